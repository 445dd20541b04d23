"""torch's optimizers of values, and what they remember: held against torch itself."""

import inspect

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from workbench.plan.experiment.optimizers import (
    ASGD,
    OPTIMIZERS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    ParameterGroup,
    RAdam,
    RMSprop,
    Rprop,
)
from workbench.train.optimizer.state import (
    build_optimizer,
    entry,
    forget,
    grouped,
    load_state,
    state_tensors,
)
from workbench.train.run.memory import PeakMeter

VALUES = [
    pytest.param(SGD(lr=0.1), id="sgd"),
    pytest.param(SGD(lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True), id="nesterov"),
    pytest.param(SGD(lr=0.1, momentum=0.9), id="momentum"),
    pytest.param(Adam(lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1), id="adam"),
    pytest.param(Adam(amsgrad=True, decoupled_weight_decay=True, weight_decay=0.1), id="amsgrad"),
    pytest.param(AdamW(lr=0.01, maximize=True), id="adamw"),
    pytest.param(Adagrad(lr_decay=0.1, initial_accumulator_value=0.5), id="adagrad"),
    pytest.param(Adadelta(weight_decay=0.1), id="adadelta"),
    pytest.param(Adamax(maximize=True), id="adamax"),
    pytest.param(NAdam(weight_decay=0.1, decoupled_weight_decay=True), id="nadam"),
    pytest.param(RAdam(betas=(0.5, 0.9)), id="radam"),
    pytest.param(RMSprop(momentum=0.9, centered=True, weight_decay=0.1), id="rmsprop"),
    pytest.param(Rprop(lr=0.02), id="rprop"),
    pytest.param(ASGD(t0=1.0, lambd=0.1, weight_decay=0.1), id="asgd"),
]
DTYPES = [torch.float32, torch.float64]
CLASSES = {one.__name__.lower(): one for one in vars(torch.optim).values() if inspect.isclass(one)}


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight": (5, 7), "bias": (5,), "nobody's": (0, 7)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
        for name, shape in shapes.items()
    }


def update(optimizer, named, step):
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    optimizer.step()


def values_of(value, named):
    return value.of({name: parameter.shape for name, parameter in named.items()})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_resumed_optimizer_goes_on_bitwise(value, dtype, done):
    """Where nothing was updated, with the rate of the first update and not of the checkpoint."""
    named = parameters(dtype)
    optimizer, values = build_optimizer(value, named.values()), values_of(value, named)
    for step in range(done):
        update(optimizer, named, step)
    saved = {k: t.clone() for k, t in state_tensors(optimizer, values, named).items()}
    resumed = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
    again = build_optimizer(value, resumed.values())
    load_state(again, values, resumed, lambda state, name: saved[entry(state, name)])
    for group in (*optimizer.param_groups, *again.param_groups):
        group["lr"] /= 2
    for step in range(done, done + 3):
        update(optimizer, named, step)
        update(again, resumed, step)
        for name in named:
            assert torch.equal(resumed[name], named[name])


@pytest.mark.parametrize("value", VALUES)
def test_is_torchs_own(value):
    named, plain = parameters(torch.float64), parameters(torch.float64)
    ours = build_optimizer(value, named.values())
    options = value.model_dump(exclude={"kind", "groups"})
    theirs = CLASSES[value.kind](plain.values(), foreach=False, **options)
    assert type(ours) is type(theirs)
    for step in range(3):
        update(ours, named, step)
        update(theirs, plain, step)
    for name in named:
        assert_close(named[name], plain[name], rtol=1e-12, atol=1e-14)


HOW = {"params", "foreach", "fused", "capturable", "differentiable"}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_options_and_defaults_are_torchs(kind):
    known = inspect.signature(CLASSES[kind]).parameters
    theirs = {name: one.default for name, one in known.items() if name not in HOW}
    assert OPTIMIZERS[kind]().options == theirs


def test_there_are_all_that_torch_has():
    """A new one is to be decided on."""
    others = {"optimizer", "adafactor", "muon", "lbfgs", "sparseadam"}
    kinds = {name.lower() for name in torch.optim.__all__ if name.lower() in CLASSES}
    assert kinds - others == set(OPTIMIZERS)


@pytest.mark.parametrize("value", VALUES)
def test_what_is_remembered_is_what_torch_remembers(value):
    """Names, shapes and first values: without a gradient, nothing has moved on from those."""
    named = {"weight": parameters()["weight"]}
    optimizer = build_optimizer(value, named.values())
    before = state_tensors(optimizer, values_of(value, named), named)
    update(optimizer, named, 0)
    held = optimizer.state[named["weight"]]
    held = {state: tensor for state, tensor in held.items() if tensor is not None}
    assert set(held) == set(value.remembers.names)
    for state, tensor in held.items():
        number = state in value.remembers.numbers
        assert tensor.shape == (() if number else (5, 7))
        assert before[entry(state, "weight")].shape == tensor.shape
        assert not number or tensor.dtype == torch.float32


@pytest.mark.parametrize("value", VALUES)
def test_first_values_are_torchs(value):
    """From our first values, and from torch's own, the first update is the same."""
    named, plain = parameters(), parameters()
    optimizer, theirs = (
        build_optimizer(value, named.values()),
        build_optimizer(value, plain.values()),
    )
    for name, tensor in state_tensors(optimizer, values_of(value, named), named).items():
        _, state, parameter = name.split("/")
        optimizer.state[named[parameter]][state] = tensor
    for step in range(2):
        update(optimizer, named, step)
        update(theirs, plain, step)
    for name in named:
        assert torch.equal(named[name], plain[name])


@pytest.mark.parametrize("value", VALUES)
def test_a_forgetful_one_begins_again(value):
    named = parameters()
    optimizer = build_optimizer(value, named.values())
    update(optimizer, named, 0)
    forget(optimizer, value)
    plain = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
    new = build_optimizer(value, plain.values())
    update(optimizer, named, 1)
    update(new, plain, 1)
    for name in named:
        assert torch.equal(named[name], plain[name])


@pytest.mark.parametrize("value", VALUES)
def test_temporary_tensors_of_an_update(value):
    """What memory prediction counts, in tensors of the parameter's size; small ones aside."""
    size = 2**14
    parameter = nn.Parameter(torch.ones(size))
    optimizer = build_optimizer(value, [parameter])
    for step in range(8):
        update(optimizer, {"weight": parameter}, step)
    with PeakMeter(torch.device("cpu")) as meter:
        optimizer.step()
        found = meter.lap().peak_bytes / (4 * size)
    assert round(found, 2) == value.workspace


def test_groups_are_torchs_own():
    groups = [
        ParameterGroup("bias", lr=0.5, momentum=0.0),
        ParameterGroup(dims=2, weight_decay=0.0),
    ]
    value = SGD(lr=0.1, momentum=0.9, weight_decay=0.2, groups=groups)
    named, plain = parameters(torch.float64), parameters(torch.float64)
    dims = {name: parameter.ndim for name, parameter in named.items()}
    ours = build_optimizer(value, *grouped(value, named, dims))
    rest = [{"params": [plain["bias"]], "lr": 0.5, "momentum": 0.0}]
    rest += [{"params": [plain["weight"]], "weight_decay": 0.0}]
    theirs = torch.optim.SGD(rest, lr=0.1, momentum=0.9, weight_decay=0.2)
    for step in range(3):
        update(ours, named, step)
        update(theirs, plain, step)
    for name in named:
        assert_close(named[name], plain[name], rtol=1e-12, atol=1e-14)
    known = state_tensors(ours, values_of(value, named), named)
    assert set(known) == {"optimizer/momentum_buffer/weight"}


@pytest.mark.parametrize(
    ("value", "devices", "fused", "foreach"),
    [
        (AdamW(), ["cpu"], True, None),
        (AdamW(), ["meta"], None, None),
        (AdamW(), ["cpu", "meta"], None, None),
        (Adamax(0.1), ["cpu"], None, False),
    ],
)
def test_is_fused_where_torch_can(value, devices, fused, foreach):
    held = [nn.Parameter(torch.empty(3, device=device)) for device in devices]
    options = build_optimizer(value, held).param_groups[0]
    assert (options.get("fused"), options["foreach"]) == (fused, foreach)


@pytest.mark.parametrize("value", VALUES)
def test_a_rank_that_owns_nothing(value):
    named = {"nobody's": nn.Parameter(torch.empty(0, 4))}
    optimizer, values = build_optimizer(value, named.values()), values_of(value, named)
    named["nobody's"].grad = torch.empty(0, 4)
    optimizer.step()
    assert state_tensors(optimizer, values, named) == {}
    load_state(optimizer, values, named, lambda state, name: pytest.fail("nothing to read"))


def test_a_parameter_without_a_gradient_keeps_its_own_count():
    value, named = Adam(), parameters()
    optimizer = build_optimizer(value, named.values())
    update(optimizer, named, 0)
    named["bias"].grad = None
    optimizer.step()
    tensors = state_tensors(optimizer, values_of(value, named), named)
    assert tensors[entry("step", "weight")] == 2
    assert tensors[entry("step", "bias")] == 1


def test_numbers_stay_wide_and_elements_are_as_the_parameter():
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    given = {"step": torch.tensor(257.0, dtype=torch.float64), "exp_avg": torch.ones(2)}
    optimizer = build_optimizer(Adam(0.1), [weight])
    load_state(optimizer, {"w": Adam(0.1)}, {"w": weight}, lambda s, _: given.get(s, torch.ones(2)))
    held = optimizer.state[weight]
    assert (held["step"].item(), held["step"].dtype) == (257.0, torch.float32)
    assert held["exp_avg"].dtype == held["exp_avg_sq"].dtype == torch.bfloat16


def test_what_was_never_updated_is_left_to_torch():
    weight = nn.Parameter(torch.ones(1))
    optimizer = build_optimizer(Adam(0.1), [weight])
    load_state(optimizer, {"w": Adam(0.1)}, {"w": weight}, lambda *_: torch.zeros(()))
    assert not optimizer.state
    plain = SGD(lr=0.1)
    optimizer = build_optimizer(plain, [weight])
    load_state(optimizer, {"w": plain}, {"w": weight}, lambda *_: torch.ones(1))
    assert not optimizer.state
