"""One check for every kind of extension, which a wrong one does not pass."""

from html import escape

import pytest
import torch

import workbench as wb
from tests.own_sums import Sign, Tree


class Lossy(Sign):
    """Forgets the last value."""

    def decode(self, wire, out):
        super().decode(wire, out)
        out[-1:] = 0.0


class Whole(wb.extend.Scheme):
    """Gives its summands for the whole sum."""

    def takes(self, layer):
        return layer.kind == "linear"

    def units(self, layer):
        return layer.input_shape[-1]

    def layouts(self, layer, division, coming):
        dim = len(layer.input_shape)
        return wb.extend.Shard(dim, division.sizes), wb.extend.Replicate()

    def holds(self, layer, weight, division, read):
        if len(weight.shape) == 1:
            return wb.extend.held_by(division.first, weight.shape[0], division.group_size)
        return wb.extend.Shard(1, division.sizes)


class Stuck(Tree):
    """Every rank waits for the one before it."""

    def rounds(self, flat, members, me):
        if len(members) > 1:
            room = torch.empty_like(flat)
            yield wb.extend.MessageRound(receives=((members[me - 1], room),))
        yield from super().rounds(flat, members, me)


class Unwell(Tree):
    """Fails on the ranks of a cluster alone."""

    def rounds(self, flat, members, me):
        if torch.distributed.is_initialized():
            raise ValueError("unwell")
        yield from super().rounds(flat, members, me)


class Nothing(wb.extend.Rule):
    """Makes no plan."""

    def plan(self, graph, world_size):
        return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "kind", "ok"),
    [
        (Tree, "algorithms", True),
        ("tests.own_sums:Tree", "algorithms", True),
        (Sign(), "codecs", True),
        (Lossy(), "codecs", False),
        (Whole(), "schemes", False),
        (Nothing(), "rules", False),
    ],
)
def test_each_kind_has_its_checks(cluster, given, kind, ok):
    found = wb.check_extension(given, cluster)
    assert (found.kind, found.ok) == (kind, ok), found
    frame = found.to_frame()
    assert frame["ok"].all() == ok
    assert len(frame) == len(found.checks) >= 3
    assert escape(found.checks[0].what) in found._repr_html_()
    assert found.checks[0].what in str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "last", "said"),
    [(Stuck(), "additions are as many", "rank 0 waits"), (Unwell(), "runs", "unwell")],
)
def test_what_does_not_run_is_reported(cluster, given, last, said):
    """After a deadlock in one process, engines would wait for the same."""
    found = wb.check_extension(given, cluster)
    assert found.checks[-1].what.startswith(last)
    assert not found.checks[-1].ok
    assert said in found.checks[-1].said


def test_what_extends_nothing_is_refused():
    for given in (3, torch.nn.Linear(1, 1), "math:exp"):
        with pytest.raises(TypeError, match=r"extends none of wb\.extend\.Algorithm, Codec"):
            wb.check_extension(given)


def test_base_classes_are_those_of_the_built_in_ones():
    from workbench.comm.algorithms.flat import FLAT
    from workbench.plan.placement.schemes import SCHEMES
    from workbench.plan.plans.rule import BUILT_IN

    assert all(isinstance(one, wb.extend.Algorithm) for one in FLAT.values())
    assert all(isinstance(one, wb.extend.Rule) for one in BUILT_IN.values())
    assert len(SCHEMES) == 5
    for sync in (wb.Synchronous(), wb.LocalSGD(), wb.Pipelined(), wb.ParameterServer()):
        assert isinstance(sync.strategy, wb.extend.Strategy)
    assert {"Algorithm", "Codec", "Rule", "Scheme", "Strategy"} <= set(dir(wb.extend))
