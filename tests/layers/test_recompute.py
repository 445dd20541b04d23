"""Layers that are computed again in backward: the same bits, what travels, and what is kept."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.layers import nets
from tests.layers.drawn import GRAPHS, plans
from tests.train.exact import Case, split
from tests.train.rounds import peak_of_a_step
from workbench.model.tracing.trace import trace
from workbench.plan.plans.plan import Plan

FEW = settings(
    max_examples=8,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def recomputed(draw, net):
    """Any plan, rows, and any layers of it to compute again."""
    plan, rows = draw(plans(net))
    names = [layer.name for layer in plan.graph.layers if layer.rows]
    return plan, rows, draw(st.lists(st.sampled_from(names), min_size=1, unique=True))


def check(on_ranks, net, plan, rows, names):
    """All that a step gives has the bits of the same plan that keeps everything."""
    cases = [Case(net, p, (rows,)) for p in (plan, plan.with_recompute(*names))]
    for kept, found in on_ranks(plan.world_size, split, cases):
        (before,), (after,) = kept.steps, found.steps
        assert torch.equal(after.outputs, before.outputs)
        assert after.loss == before.loss
        for got, expected in [(after.gradients, before.gradients), (found.values, kept.values)]:
            assert got.keys() == expected.keys()
            for name in expected:
                assert torch.equal(got[name], expected[name]), name


@pytest.mark.parametrize("net", nets.NETS)
def test_everything_again(on_ranks, net):
    plan = Plan.hybrid(GRAPHS[net], 2).with_batch_norm("synchronized")
    check(on_ranks, net, plan, (2, 3), ["*"])


@pytest.mark.slow
@pytest.mark.parametrize("net", [nets.Images, nets.Residual, nets.Tokens, nets.Tied])
@FEW
@given(data=st.data())
def test_any_layers(on_ranks, net, data):
    check(on_ranks, net, *data.draw(recomputed(net)))


def crossing(ranks, op, layer, phase):
    """For each rank, the bytes that a layer's conversion brought."""
    return [sum(r[-1] for r in rank.traffic if r[:3] == (op, layer, phase)) for rank in ranks]


@pytest.mark.slow
def test_conversions_inside_a_segment_are_repeated_and_those_at_its_borders_are_not(on_either):
    """The head's pair: rows are gathered for head.0, and head.4 reads a sum."""
    net = nets.Images
    plan = Plan.hybrid(GRAPHS[net], 2).with_batch_norm("synchronized")
    pair = [n for n, c in plan.layers.items() if c.scheme != "replicate"]
    assert pair == ["head.0", "head.3", "head.5"]
    segments = [
        (["head.0", "head.1", "head.2", "head.3"], 1, 1),
        (["head.0", "head.1", "head.2", "head.3", "head.4", "head.5"], 1, 2),
        (["*"], 2, 2),
    ]
    cases = [
        Case(net, p, ((2, 3),)) for p in (plan, *(plan.with_recompute(*s[0]) for s in segments))
    ]
    kept, *others = zip(*on_either(2, split, cases), strict=True)
    gathered = crossing(kept, "all_gather", "head.0", "forward")
    summed = crossing(kept, "all_reduce", "head.4", "forward")
    assert all(gathered)
    assert all(summed)
    for (_, gathers, sums), found in zip(segments, others, strict=True):
        assert crossing(found, "all_gather", "head.0", "forward") == [gathers * b for b in gathered]
        assert crossing(found, "all_reduce", "head.4", "forward") == [sums * b for b in summed]
        for mine, before in zip(found, kept, strict=True):
            back = [r for r in before.traffic if r[2] == "backward"]
            assert sorted(r for r in mine.traffic if r[2] == "backward") == sorted(back)


class Deep(nn.Module):
    """Sixteen wide layers, each followed by one that keeps its output."""

    shape = (8,)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.blocks = nn.Sequential(
            *(part for _ in range(16) for part in (nn.Linear(64, 64), nn.Tanh()))
        )
        self.last = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


@pytest.mark.slow
def test_the_peak_falls_by_what_is_dropped(on_ranks):
    """By hand, in activations of 1000 x 64 in fp64.

    Kept: the 17 inputs of wide layers and of the last one; highest at the last tanh, whose
    gradient and whose input's gradient are there too: 19. Recomputed but for every fourth tanh:
    4 inputs of segments, and the last one; of the last segment, its other 3 tanhs; the same two
    gradients when its last linear layer has been reached, 4 + 3 + 2 = 9. All in one segment: its
    input, then everything again.
    """
    rows, activation = 1000, 1000 * 64 * 8
    plan = Plan.data_parallel(trace(Deep(), input_shape=Deep.shape), 1)
    parted = plan.with_recompute("blocks.*").with_recompute(
        *(f"blocks.{i}" for i in range(7, 32, 8)), recompute=False
    )
    assert [len(segment) for segment in parted.segments] == [7, 7, 7, 7]
    peaks = [
        on_ranks(1, peak_of_a_step, each, Deep, (rows,))[0] / activation
        for each in (plan, parted, plan.with_recompute("blocks.*"))
    ]
    assert peaks == pytest.approx([19, 9, 19], abs=0.3)
