"""Optimizers as values: their names, their groups, and what is refused."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.plan.graphs import vgg
from workbench.plan.experiment.experiment import (
    Experiment,
    LocalSGD,
    Pipelined,
    Synchronous,
)
from workbench.plan.experiment.optimizers import (
    ASGD,
    OPTIMIZERS,
    SGD,
    Adam,
    AdamW,
    NAdam,
    ParameterGroup,
    RMSprop,
    Rprop,
)
from workbench.plan.io.errors import ExperimentError
from workbench.plan.plans.plan import Plan
from workbench.predict.memory.resident import optimizer_bytes
from workbench.program.step import program_of
from workbench.train.optimizer.state import build_optimizer

PLAN = Plan.hybrid(vgg(), 4, 2)
FIELDS = dict(plan=PLAN, data="digits", optimizer=SGD(lr=0.1), steps=10)
IN_ROUNDS = Plan.hybrid(vgg(), 4, 2, rounds="B")
BIASES = ParameterGroup("*.bias", weight_decay=0.0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_has_a_name_and_a_text(name):
    value = Experiment(**FIELDS).replace(optimizer=name)
    assert value.optimizer == OPTIMIZERS[name]()
    assert Experiment.from_toml(value.to_toml()) == value


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("muon", "whole matrices"),
        ("Adafactor", "rows and columns of whole matrices"),
        ("lbfgs", "all parameters"),
        ("SparseAdam", "sparse gradients"),
        ("lion", "there are 'sgd', 'adam'"),
    ],
)
def test_others_are_refused_by_name(name, why):
    with pytest.raises(ExperimentError, match=rf"no optimizer '{name}'.*{why}.*'rprop', 'asgd'"):
        Experiment(**FIELDS | dict(optimizer=name))
    text = Experiment(**FIELDS).to_toml().replace('kind = "sgd"', f'kind = "{name}"')
    with pytest.raises(ExperimentError, match="optimizer"):
        Experiment.from_toml(text)


def test_what_is_remembered_depends_on_options():
    assert SGD(0.1).remembers.names == ()
    assert SGD(0.1, momentum=0.5).remembers.names == ("momentum_buffer",)
    assert AdamW(amsgrad=True).remembers.names[-1] == "max_exp_avg_sq"
    assert RMSprop(momentum=0.1, centered=True).remembers.names[2:] == (
        "momentum_buffer",
        "grad_avg",
    )
    assert (Rprop(0.3).remembers["step_size"], ASGD(0.3).remembers["eta"]) == (0.3, 0.3)
    assert (NAdam().remembers["mu_product"], ASGD().remembers["mu"]) == (1.0, 1.0)


def test_groups_by_name_and_by_dimensions():
    groups = [ParameterGroup("classifier.*", lr=0.5), ParameterGroup(dims=1, betas=[0.8, 0.9])]
    value = AdamW(1e-3, groups=groups)
    shapes = {"classifier.0.bias": (4,), "conv.weight": (4, 3, 3, 3), "conv.bias": (4,)}
    found = value.of(shapes)
    assert [one.lr for one in found.values()] == [0.5, 1e-3, 1e-3]
    assert [one.betas for one in found.values()] == [(0.9, 0.999), (0.9, 0.999), (0.8, 0.9)]
    both = ParameterGroup("*.bias", "*.weight", dims=1, lr=0.5)
    assert both.matches("a.bias", 1)
    assert not both.matches("a.weight", 2)
    assert value.at_rate(2e-3).parted[1].lr == pytest.approx(1.0)
    assert value.at_rate(2e-3).parted[2].lr == 2e-3


def test_a_replaced_group_keeps_its_options():
    assert BIASES.replace(dims=1).options == {"weight_decay": 0.0}


def test_groups_in_text():
    groups = [
        ParameterGroup("*.bias", "x*", weight_decay=0),
        ParameterGroup(dims=1, betas=[0, 0.5]),
    ]
    with pytest.raises(ExperimentError, match=r"dims=1\) are in earlier groups.*put it before"):
        Experiment(**FIELDS | dict(optimizer=AdamW(groups=groups)))
    run = Experiment(**FIELDS | dict(optimizer=AdamW(groups=groups[:1])))
    assert Experiment.from_toml(run.to_toml()) == run
    assert 'patterns = ["*.bias", "x*"], weight_decay = 0.0' in run.to_toml()
    alone = run.to_toml().replace('["*.bias", "x*"]', '"*.bias"')
    assert Experiment.from_toml(alone).optimizer.groups == (BIASES,)
    assert AdamW(groups=groups).groups[1].options == {"betas": (0.0, 0.5)}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: AdamW(groups=[ParameterGroup("*", momentum=0.5)]), "has momentum, which AdamW"),
        (lambda: AdamW(groups=[ParameterGroup("*", betas=3)]), "betas"),
        (lambda: SGD(0.1, groups=[ParameterGroup("*", nesterov=True)]), "nesterov needs momentum"),
        (lambda: ParameterGroup("*.bias"), "no options of its own"),
        (lambda: ParameterGroup(lr=0.1), "needs patterns"),
        (lambda: SGD(0.1, momentum=0.9, nesterov=True, dampening=0.1), "dampening 0"),
    ],
)
def test_what_is_refused_of_values(made, said):
    with pytest.raises(ExperimentError, match=said):
        made()


@pytest.mark.parametrize("name", ["fused", "foreach", "capturable", "differentiable"])
@pytest.mark.parametrize("value", [SGD, RMSprop])
def test_how_torch_computes_an_update_is_not_chosen(value, name):
    assert value(0.1, **{name: None}) == value(0.1)
    with pytest.raises(ExperimentError, match=f"{name} is not .*fused kernel.*leave {name} out"):
        value(0.1, **{name: True})


def test_a_group_of_nothing_is_told_the_first_names():
    value = SGD(0.1, groups=[ParameterGroup("x", lr=0.1)])
    for count, said in ((6, "give one of 'p0', .*'p5'$"), (8, "'p5' and 2 more$")):
        with pytest.raises(ValueError, match=said):
            value.check_groups({f"p{index}": (1,) for index in range(count)})


def test_a_group_of_nothing_is_refused():
    value = SGD(0.1, groups=[ParameterGroup("*.gamma", lr=0.1)])
    with pytest.raises(ExperimentError, match=r"'\*.gamma'\) matches no parameter; give one of '"):
        Experiment(**FIELDS | dict(optimizer=value))


@pytest.mark.parametrize("sync", [Pipelined(), LocalSGD(momentum="reset")], ids=str)
def test_dampening_needs_a_first_gradient(sync):
    value = SGD(0.1, momentum=0.9, dampening=0.5)
    assert Experiment(**FIELDS | dict(optimizer=value)).optimizer == value
    with pytest.raises(ExperimentError, match="dampening leaves the first gradient whole"):
        Experiment(**FIELDS | dict(optimizer=value, sync=sync))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(sync=LocalSGD()), r"under LocalSGD no rank has.*valid with Synchronous"),
        (dict(plan=IN_ROUNDS, sync=Synchronous(per_round=True)), "per_round=False"),
        (dict(clip_value=1.0), "exclude each other"),
        (dict(clip_norm=0.0), "greater than 0"),
    ],
)
def test_clipping_that_is_refused(fields, said):
    with pytest.raises(ExperimentError, match=said):
        Experiment(**FIELDS | dict(clip_norm=1.0) | fields)


def test_clipping_is_listed_before_the_update():
    late = Pipelined(compensation="delay")
    for sync, listed in (
        ("synchronous", ["wait", "agree", "clip", "update"]),
        (late, ["wait", "agree", "adjust", "clip", "reduce", "update"]),
    ):
        run = Experiment(**FIELDS, clip_norm=1.0, sync=sync)
        assert Experiment.from_toml(run.to_toml()) == run
        words = [one.word for one in program_of(run).instructions]
        behind = words[words.index("wait") :]
        assert list(dict.fromkeys(behind)) == listed


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(sync=LocalSGD()), r"under LocalSGD each rank has its own.*valid with Synchronous"),
        (dict(plan=IN_ROUNDS, sync=Synchronous(per_round=True)), "per_round=False"),
        (dict(ema=1.0), "less than 1"),
    ],
)
def test_averages_that_are_refused(fields, said):
    with pytest.raises(ExperimentError, match=said):
        Experiment(**FIELDS | dict(ema=0.9) | fields)


def test_averages_are_a_copy_of_what_is_updated():
    plain, averaged = (program_of(Experiment(**FIELDS, ema=ema)) for ema in (None, 0.9))
    assert not optimizer_bytes(plain, plain.handed)
    held = sum(optimizer_bytes(averaged, averaged.handed).values())
    assert held.tolist() == [4 * PLAN.parameters_of(rank) for rank in range(4)]


@pytest.mark.parametrize(
    ("value", "passes"),
    [
        (SGD(0.1), 3),
        (SGD(0.1, momentum=0.9), 5),
        (Adam(), 7),
        (AdamW(amsgrad=True), 9),
    ],
)
def test_one_kernel_reads_and_writes_each_number_once(value, passes):
    """The weight, read and written; the gradient; and each state, read and written."""
    assert value.passes == passes


class Temporaries(TorchDispatchMode):
    """Counts the new tensors of `numel` elements that are alive at one time."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.made, self.most = numel, [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in self.large((args, kwargs))}
        new = [t for t in self.large(found) if t.untyped_storage().data_ptr() not in given]
        self.made += map(weakref.ref, new)
        self.most = max(self.most, sum(made() is not None for made in self.made))
        return found

    def large(self, tree):
        leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        return [leaf for leaf in leaves if leaf.numel() == self.numel]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (name, fields)
        for name, kind in OPTIMIZERS.items()
        for fields in ({}, {"maximize": True}, {"weight_decay": 0.1})
        if set(fields) <= set(kind.model_fields)
    ],
    ids=str,
)
def test_an_update_makes_as_many_temporary_tensors_as_is_said(name, fields):
    averaging = {"t0": 1.0} if name == "asgd" else {}
    value = OPTIMIZERS[name](**fields, **averaging)
    parameter = torch.nn.Parameter(torch.ones(64))
    optimizer = build_optimizer(value, [parameter])
    for _ in range(7):  # RAdam rectifies from the sixth update
        parameter.grad = torch.ones(64)
        with Temporaries(64) as temporaries:
            optimizer.step()
    assert temporaries.most == value.workspace


def test_decay_that_is_decoupled_copies_no_gradient():
    assert NAdam(weight_decay=0.1).workspace == NAdam().workspace + 1
    assert NAdam(weight_decay=0.1, decoupled_weight_decay=True).workspace == NAdam().workspace
