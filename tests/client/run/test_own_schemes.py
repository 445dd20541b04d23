"""A person's own scheme on the ranks of a cluster: exact, or found not to be."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import workbench as wb
from tests.plan.placement.own import ByGroups, ConvOut, Inside, OtherSlice, Twice, Unsummed
from workbench.client.checks.schemes import checks_of, cluster_checks_of, small_models
from workbench.plan.placement.placement import Partial, Replicate, Shard
from workbench.plan.placement.schemes import Duplicated, ShardIn, ShardOut
from workbench.plan.plans.plan import Plan
from workbench.store.errors import RunError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.conv = nn.Conv1d(3, 6, 3, padding=1)
        self.up = nn.ConvTranspose2d(6, 8, 2)
        self.norm = nn.GroupNorm(4, 8)
        self.fc = nn.Linear(144, 10)

    def forward(self, x):
        x = self.conv(self.first(x).tanh()).unsqueeze(-1)
        return self.fc(torch.flatten(self.norm(self.up(x)), 1))


def net():
    torch.manual_seed(0)
    return Net()


GRAPH = wb.trace(net(), input_shape=(3, 8))
WHOLE = Plan.data_parallel(GRAPH, 2)


def own(scheme=None, **schemes):
    plan = WHOLE
    for name, given in {"conv": ConvOut(), "up": ConvOut(), "fc": Inside(), **schemes}.items():
        plan = plan.with_layer(name, scheme=given, group_size=2)
    return plan.with_layer("norm", scheme=ByGroups(), group_size=2)


def experiment(plan, **fields):
    data = wb.Synthetic(samples=64, classes=10)
    given = dict(data=data, batch_size=16, optimizer=wb.SGD(0.1, momentum=0.9), steps=6)
    return wb.Experiment(plan=plan, **given | fields)


@pytest.mark.slow
def test_right_ones_are_exact_with_any_shares(cluster):
    found = cluster.verify(own())
    assert found.exact, found
    assert found.coverage.missing == ()
    unequal = own()
    for name, shares in {"conv": (5, 1), "up": (1, 3), "norm": (3, 1), "fc": (1, 2)}.items():
        unequal = unequal.with_layer(name, shares=shares)
    assert cluster.verify(unequal, repeat=False).exact
    idle = own().with_layer("conv", shares=(1, 0)).with_layer("norm", shares=(0, 1))
    assert cluster.verify(idle, repeat=False).exact


@pytest.mark.slow
def test_what_makes_no_module_is_refused_by_name(cluster):
    class Bare(Inside):
        def local(self, module, layer, division, member):
            return nn.Identity()

    text = r"layer 'fc', scheme 'Bare': `local` must return a module that holds the parameters"
    with pytest.raises(RunError, match=text):
        cluster.verify(own(fc=Bare()), repeat=False)


@pytest.mark.slow
def test_a_run_trains_is_loaded_goes_on_and_is_cut_anew(cluster):
    run = cluster.train(experiment(own(), checkpoint_every=3)).wait()
    assert run.experiment.plan == own().with_own(
        lambda scheme, place: run.experiment.plan.layers[place.split(".")[1]].scheme
    )
    saved = wb.Run.load(run.directory).experiment
    assert saved.to_toml() == run.experiment.to_toml()
    assert not saved.plan.is_at_hand
    assert "ConvOut" in repr(saved.plan)
    more = run.experiment.replace(steps=12)
    assert cluster.train(more, resume=run).wait().state == "finished"
    whole = cluster.train(experiment(WHOLE, steps=12)).wait()
    split = cluster.train(experiment(own(), steps=12)).wait()
    losses = [one.metrics.query("rank == 0").loss.to_numpy() for one in (whole, split)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [ConvOut(), "tests.plan.placement.own:ConvOut"])
def test_a_run_goes_on_under_it(cluster, scheme):
    run = cluster.train(experiment(WHOLE, steps=400))
    change = run.replan(own(conv=scheme))
    run.wait()
    # Others may write into a run's folder: what it has for ranks to load is under a MAC.
    assert "own:ConvOut" not in (run.directory / "requests" / "0001.toml").read_text()
    assert change.carried_out is not None
    assert run.experiment.plan.layers["conv"].name == "ConvOut"
    assert run.experiment.plan.flow.weights["conv.weight"].piece_numel(0) == 27


@pytest.mark.slow
def test_predicted_bytes_are_those_that_are_recorded(cluster):
    """Of every collective of a step: conversions, gradients of activations and of weights."""
    run = cluster.train(experiment(own(), steps=12, trace_every=3)).wait()
    machine = wb.Machine.preset("cpu-10gbe").replace(ranks_per_host=None)  # as engines are here
    compared = run.compare(wb.predict(run.experiment, machine))
    assert len(compared.ranks) == 2
    for rank in compared.ranks:
        assert rank.received_bytes.measured == rank.received_bytes.predicted > 0


def test_memory_and_flops_follow_from_what_it_states():
    whole, split = (wb.predict(experiment(plan)) for plan in (WHOLE, own()))
    for name in ("conv", "up"):
        there, here = (one.memory[0].of_layer(name)["weights"] for one in (whole, split))
        assert 2 * here == there == 4 * GRAPH[name].parameters
    # It reads all rows of the group, and saves these; its output is gathered, and freed.
    rows, features = 16, 3 * 8
    assert split.memory[0].of_layer("conv")["activations"] == rows * features * 4
    works = [wb.plan.work_of(own(), GRAPH["conv"], rank, (8, 8), "fp32") for rank in (0, 1)]
    assert works[0].flops == GRAPH["conv"].flops * 16 / 2
    assert works[0] == works[1]


class OnRanks(ConvOut):
    """Wrong: on ranks it states something else than where it is predicted."""

    def takes(self, layer):
        return layer.target == "torch.nn.Conv1d"

    @property
    def summed_back(self):
        import os

        return "WORKBENCH_ENGINE" in os.environ


class Columns(ShardIn):
    """As the built-in one, as a person's own."""


class Rows(ShardOut):
    """As the built-in one, as a person's own."""


class All(Duplicated):
    """As the built-in one, as a person's own."""

    def takes(self, layer):
        return layer.kind == "linear"


class Reversed(Rows):
    """Wrong: the last rank's part is the first rank's."""

    def holds(self, layer, weight, division, read):
        return (
            Shard(0, division.sizes[::-1])
            if division.given
            else super().holds(layer, weight, division, read)
        )


class Overlapping(Rows):
    def takes(self, layer):
        raise IndexError("nothing there")


class BiasOfAll(Columns):
    """Wrong: the bias is in another rank's summand than the first, and so in none."""

    def local(self, module, layer, division, member):
        if getattr(module, "bias", None) is not None:
            module.register_parameter("unused_bias", module.bias)
            module.bias = None
        return module


class Capricious(Rows):
    """Wrong: what it states depends on how often it was asked."""

    asked = 0

    def layouts(self, layer, division, coming):
        Capricious.asked += 1
        read, given = super().layouts(layer, division, coming)
        if Capricious.asked % 5 == 0:
            return read, Shard(given.dim, given.sizes[::-1])
        return read, given


class Lazy(Rows):
    def flops(self, layer, division, member, read, given):
        return 0.1


class Differs(All):
    """Wrong: ranks that hold the same weights get different gradients."""

    def local(self, module, layer, division, member):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                for name, parameter in module.named_parameters():
                    self.register_parameter(name, parameter)

            def forward(self, x):
                y = nn.functional.linear(x, self.weight, getattr(self, "bias", None))
                return torch.where(torch.tensor(member > 0), y + (y - y.detach()), y)

        return Scaled()


class OfTwo(Columns):
    """Wrong, but in groups of two: a factor that should be one is two over the ranks."""

    def takes(self, layer):
        return layer.target == "torch.nn.Linear"

    def local(self, module, layer, division, member):
        module.register_forward_hook(lambda _, __, given: given * 2 / len(division.sizes))
        return module


class ColumnsOfRows(Columns):
    """Wrong for matrices that lie the other way."""

    def holds(self, layer, weight, division, read):
        return super().holds(replace(layer, transposed=False), weight, division, read)


class Nowhere(Rows):
    def takes(self, layer):
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "model", "shares"),
    [
        (Unsummed(), 0, None),
        (OtherSlice(), 0, None),
        (Twice(), 0, None),
        (Reversed(), 0, (3, 1)),
        (BiasOfAll(), 0, None),
        (Differs(), 0, None),
        (ColumnsOfRows(), 2, None),  # the one whose matrix lies the other way
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_wrong_ones_are_found(cluster, scheme, model, shares):
    small = small_models(scheme, 2)[model]
    plan = small.plan(scheme, 2, shares)
    try:
        found = cluster.verify(plan, module=small.module, repeat=False, steps=2)
    except RunError:
        return  # refused on ranks
    assert not found.exact


@pytest.mark.parametrize(
    ("scheme", "failing", "text"),
    [
        (Overlapping(), 0, "IndexError: nothing there"),
        (Nowhere(), 0, "it took none of the layers that are tried: Linear, Transposed"),
        (Capricious(), 1, "asked again"),
        (Lazy(), 2, "are less than the whole"),
    ],
)
def test_what_is_stated_wrong_is_found_without_engines(scheme, failing, text):
    stated = next(checks_of(scheme, range(2)))
    assert [number for number, check in enumerate(stated) if not check.ok] == [failing]
    assert text in stated[failing].said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "expected"),
    [(ConvOut(), [True, True, True]), (OnRanks(), [True, True, False])],
)
def test_the_checks_of_a_cluster(cluster, scheme, expected):
    found = cluster_checks_of(scheme, cluster, small_models(scheme, 2)[:1])
    assert [check.ok for check in found] == expected, found
    assert expected[2] or "were predicted" in found[2].said


@pytest.mark.slow
def test_an_output_of_another_shape_is_refused_by_name(cluster):
    class Careless(ConvOut):
        def layouts(self, layer, division, coming):
            return Replicate(), Partial()

    (found,) = [one for one in wb.check_extension(Careless(), cluster).checks if not one.ok][:1]
    assert "layer '1', scheme 'Careless': `local`, on rank " in found.said
    assert "gives (4, 6) for a sample, and its layout of the output says (8, 6)" in found.said


@pytest.mark.slow
def test_a_factor_that_is_right_for_two_ranks_alone_is_found():
    checked = wb.check_extension(OfTwo())
    stated, exact = checked.checks[:3], checked.checks[3]
    assert all(check.ok for check in stated)
    assert not exact.ok
    assert "on 3 ranks" in exact.said
    assert "failed" not in exact.said  # it runs, and computes something else
