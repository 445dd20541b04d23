import pytest
import torch
from torch import nn
from torch.testing import assert_close

from workbench.plan.experiment.experiment import SGD, Adam, AdamW
from workbench.train.strategies.optimizer import (
    build_optimizer,
    entry,
    load_state,
    state_names,
    state_tensors,
)

VALUES = [
    pytest.param(SGD(lr=0.1), id="sgd"),
    pytest.param(SGD(lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True), id="nesterov"),
    pytest.param(SGD(lr=0.1, momentum=0.9), id="momentum"),
    pytest.param(Adam(lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1), id="adam"),
    pytest.param(AdamW(lr=0.01), id="adamw"),
]
DTYPES = [torch.float32, torch.float64]


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_resumed_optimizer_goes_on_bitwise(value, dtype, done):
    named = parameters(dtype)
    optimizer = build_optimizer(value, named.values())
    for step in range(done):
        update(optimizer, named, step)
    saved = {k: t.clone() for k, t in state_tensors(optimizer, value, named).items()}
    resumed = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
    again = build_optimizer(value, resumed.values())
    load_state(again, value, resumed, lambda state, name: saved[entry(state, name)])
    for step in range(done, done + 3):
        update(optimizer, named, step)
        update(again, resumed, step)
        for name in named:
            assert torch.equal(resumed[name], named[name])


@pytest.mark.parametrize("value", VALUES)
def test_is_torchs_own(value):
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    named, plain = parameters(torch.float64), parameters(torch.float64)
    ours = build_optimizer(value, named.values())
    theirs = kind[value.kind](plain.values(), foreach=False, **value.model_dump(exclude={"kind"}))
    assert type(ours) is type(theirs)
    for step in range(3):
        update(ours, named, step)
        update(theirs, plain, step)
    for name in named:
        assert_close(named[name], plain[name], rtol=1e-12, atol=1e-14)


def test_is_fused_where_torch_can():
    assert build_optimizer(AdamW(), parameters().values()).defaults["fused"]
    meta = nn.Parameter(torch.empty(3, device="meta"))
    assert not build_optimizer(AdamW(), [meta]).defaults["fused"]


@pytest.mark.parametrize("value", VALUES)
def test_a_rank_that_owns_nothing(value):
    named = {"nobody's": nn.Parameter(torch.empty(0, 4))}
    optimizer = build_optimizer(value, named.values())
    named["nobody's"].grad = torch.empty(0, 4)
    optimizer.step()
    assert state_tensors(optimizer, value, named) == {}
    load_state(optimizer, value, named, lambda state, name: pytest.fail("nothing to read"))


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("done", [0, 2])
def test_state_is_named_and_shaped_like_its_parameter(value, done):
    named = parameters()
    optimizer = build_optimizer(value, named.values())
    for step in range(done):
        update(optimizer, named, step)
    tensors = state_tensors(optimizer, value, named)
    expected = {entry(s, name) for s in state_names(value) for name in ("weight", "bias")}
    assert set(tensors) == expected
    for state in state_names(value):
        shape = () if state == "step" else (5, 7)
        assert tensors[entry(state, "weight")].shape == shape


def test_a_parameter_without_a_gradient_keeps_its_own_count():
    value, named = Adam(), parameters()
    optimizer = build_optimizer(value, named.values())
    update(optimizer, named, 0)
    named["bias"].grad = None
    optimizer.step()
    tensors = state_tensors(optimizer, value, named)
    assert tensors[entry("step", "weight")] == 2
    assert tensors[entry("step", "bias")] == 1
