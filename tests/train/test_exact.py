"""Any net under any plan, in any rounds, with any rows: what one process computes."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.layers import nets
from tests.layers.drawn import GRAPHS, shares
from tests.train.exact import Case, check
from workbench.plan.placement.placement import apportion
from workbench.plan.placement.rounds import ROUNDS, RoundsError
from workbench.plan.placement.schemes import schemes_of
from workbench.plan.plans.plan import Plan

TOGETHER = 18  # cases for which the ranks meet once: 216 in all


@st.composite
def cases(draw, world):
    """Schemes, group sizes, shares and rounds for a net on `world` ranks, and their rows.

    Layers are either cut anywhere, each over ranks of its own, or from one layer on over the
    same ranks, so that many a plan has a tail that can run in rounds.
    """
    net = draw(st.sampled_from(nets.NETS))
    graph = GRAPHS[net]
    plan = Plan.data_parallel(graph, world).with_batch_norm("synchronized")
    sizes = [k for k in range(1, world + 1) if world % k == 0]
    splittable = [layer for layer in graph.layers if schemes_of(layer)]
    first = draw(st.none() | st.integers(0, len(splittable) - 1))
    together = draw(st.sampled_from(sizes))
    for layer in splittable[first or 0 :]:
        scheme = draw(st.sampled_from(schemes_of(layer)))
        k = together if first is not None else draw(st.sampled_from(sizes))
        k = 1 if scheme == "replicate" else k
        cut_by = draw(st.none() | shares(k)) if scheme.startswith("shard") else None
        plan = plan.with_layer(layer.name, scheme=scheme, group_size=k, shares=cut_by)
    try:
        plan = plan.with_rounds(draw(st.sampled_from(ROUNDS)))
    except RoundsError:
        pass
    rows = [apportion(draw(st.integers(1, 9)), draw(shares(world))) for _ in range(2)]
    return Case(net, plan, tuple(rows))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@settings(
    max_examples=2,
    phases=[Phase.generate],  # a case whose ranks wait for each other would do so many times
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_any_case_is_what_one_process_computes(on_either, world, data):
    """Two steps with momentum: outputs, loss, gradients, then weights and statistics."""
    drawn = st.lists(cases(world), min_size=TOGETHER, max_size=TOGETHER, unique=True)
    check(on_either, data.draw(drawn))


def case(net, world, choices, *steps, rounds="BK"):
    plan = Plan.data_parallel(GRAPHS[net], world).with_batch_norm("synchronized")
    for name, (scheme, k, cut_by) in choices.items():
        plan = plan.with_layer(name, scheme=scheme, group_size=k, shares=cut_by)
    return Case(net, plan.with_rounds(rounds), steps)


@pytest.mark.slow
def test_one_case_of_each_kind(on_ranks):
    head = {"head.0": ("shard_out", 3, (2, 0, 1)), "head.3": ("shard_in", 3, None)}
    mlp = {"mlp.0": ("shard_out", 3, (1, 0, 2)), "mlp.3": ("shard_in", 3, None)}
    filters = {"stem": ("shard_out", 3, (0, 3, 1)), "a": ("shard_in", 3, None)}
    some, none = (3, 1, 2), (0, 4, 0)
    cases = [
        case(nets.Images, 3, head, some, none),
        case(nets.Images, 3, head, some, none, rounds="B"),
        case(nets.Images, 3, head, none, some, rounds="B/K"),
        case(nets.Tokens, 3, mlp, some, some),
        case(nets.Tied, 3, {"between": ("duplicate", 3, None)}, some),
        case(nets.Residual, 3, filters, some, none),
    ]
    check(on_ranks, cases)


@pytest.mark.slow
def test_filters_by_speed_are_what_one_process_computes(on_ranks):
    """Plain, residual, depthwise and excited layers, and tokens, with shares of 8, 0 and 3."""
    cases = []
    for net in (nets.Images, nets.Residual, nets.Picture, nets.Tokens):
        plan = Plan.filters(GRAPHS[net], 3, (8, 0, 3), grain=2).with_batch_norm("synchronized")
        cases.append(Case(net, plan, (plan.rows_of(9), plan.rows_of(1))))
    check(on_ranks, cases)


def test_a_module_may_idle_in_one_of_its_calls(on_ranks):
    """The one ReLU reads the whole output of `a`, and on rank 0 nothing of the stem's."""
    check(on_ranks, [case(nets.Residual, 2, {"stem": ("shard_out", 2, (0, 1))}, (1, 1))])


def test_what_idles_stays_tied_to_all_that_it_reads(on_ranks):
    """Ranks 0 and 2 have no features of a sum, both of whose terms crossed the group."""
    choices = {
        "a": ("shard_out", 3, None),
        "b": ("shard_out", 3, (0, 3, 0)),
        "squeeze": ("shard_in", 3, None),
        "excite": ("shard_out", 3, None),
        "fc": ("duplicate", 3, None),
    }
    check(on_ranks, [case(nets.Residual, 3, choices, (0, 4, 2), (1, 0, 1))])


TIED = [
    (nets.Words, "table", "shard_in", (2, 0, 1)),
    (nets.Words, "table", "shard_out", (0, 2, 1)),
    (nets.Words, "scores", "duplicate", None),
    (nets.Tied, "twice", "shard_out", (1, 0, 2)),
    (nets.Tied, "twice", "shard_in", None),
    (nets.Tied, "decode", "shard_in", (0, 1, 1)),
    (nets.Attending, "attention", "shard_heads", None),
]


@pytest.mark.slow
def test_weights_that_layers_share_are_cut_alike(on_ranks):
    """A table by tokens or features with what is tied to it; layers called twice."""
    cases = [case(net, 3, {name: (scheme, 3, cut)}, (3, 1, 2)) for net, name, scheme, cut in TIED]
    check(on_ranks, cases)
