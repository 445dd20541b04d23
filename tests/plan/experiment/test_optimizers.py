"""Optimizers as values: their names, their groups, and what is refused."""

import pytest

from tests.plan.graphs import vgg
from workbench.plan.errors import ExperimentError
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
    AdamW,
    NAdam,
    ParameterGroup,
    RMSprop,
    Rprop,
)
from workbench.plan.plan import Plan
from workbench.predict.memory.resident import optimizer_bytes
from workbench.program.step import program_of

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
