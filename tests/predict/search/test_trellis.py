"""The paths of a trellis are all plans, each once, and cost what the plans' flows say."""

import zlib
from itertools import product

import pytest
from hypothesis import given, settings

from tests.layers import heads
from tests.plan import graphs
from tests.predict.search.drawn import convolutions, tokens
from workbench.model.tracing.trace import trace
from workbench.plan.placement.flow import crossings, returned, summed_over
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import ROWS, Layout, Replicate
from workbench.plan.placement.rules import read_whole, way_of
from workbench.plan.plans.plan import Plan
from workbench.predict.search.choices import LocalPlacement, options_of
from workbench.predict.search.trellis import Weighted, trellis_of


def toll(*what):
    """Some cost, the same for the same thing, and unlike that of any other."""
    return zlib.crc32(repr(what).encode()) / 2**32


class Tolls:
    """Costs that tell every layer, layout and conversion from every other.

    What lies as its reader says is paid for by that.
    """

    def __init__(self, graph):
        self.graph = graph
        self.read_whole = {one.name: read_whole(graph, one) for one in graph.layers}
        self.paid_for = {one.name for some in self.read_whole.values() for one in some}

    def layer(self, layer, choice, read, given):
        if layer.name in self.paid_for:
            return (0.0, 1.0)
        total, cut = toll(layer.name, choice, read, given), way_of(layer, read)
        whole = Layout(read.group_size, Replicate()) if cut else ROWS
        for one in self.read_whole[layer.name]:
            total += toll(one.name, None, whole, whole)
            if cut and one.name in layer.inputs:
                total += tolls_of(one.name, [(summed_over(whole, one.output_shape),)])
        return (total, 1.0)

    def converted(self, layer, name, read):
        return (0.0, 0.0)

    def value(self, name, source, readings, carried):
        layer = None if name == "input" else self.graph[name]
        shape = self.graph.input_shape if layer is None else layer.output_shape
        rows = 1 if layer is None else layer.rows
        chains = []
        for target in {target for target, _ in readings} if rows and not carried else ():
            summands = [sums for layout, sums in readings if layout == target]
            chains += crossings(source, target, summands, shape, rows)
        if name in self.graph.outputs:
            chains += crossings(source, returned(self.graph, name, source), [False], shape, rows)
        return (tolls_of(name, chains), 0.0)

    def alike(self, name):
        return name


def tolls_of(name, chains):
    starts = {chain[: end + 1] for chain in chains for end in range(len(chain))}
    return sum(toll(name, start) for start in starts)


def cost_of(plan, options):
    """What a plan costs, from its flow alone."""
    graph, flow = plan.graph, plan.flow
    total = 0.0
    for layer in graph.layers:
        choice = plan.layers.get(layer.name, LayerPlan()) if layer.name in options else None
        total += toll(layer.name, choice, flow.inputs[layer.name], flow.outputs[layer.name])
    for name in ("input", *(layer.name for layer in graph.layers)):
        chains = [flow.edges[name, reader] for reader in graph.consumers[name]]
        chains += [flow.returns[name]] if name in graph.outputs else []
        total += tolls_of(name, chains)
    return total


def laid(graph, world, shares=None):
    sizes = [k for k in range(1, world + 1) if world % k == 0]
    options = options_of(graph, world, sizes, shares or {}, {})
    return trellis_of(graph, LocalPlacement(graph, options), options, Tolls(graph)), options


def every_plan(graph, world, options):
    for choices in product(*options.values()):
        yield Plan(graph, world, dict(zip(options, choices, strict=True)))


def check_all(graph, world, shares=None):
    trellis, options = laid(graph, world, shares)
    costs = sorted(cost_of(plan, options) for plan in every_plan(graph, world, options))
    weighted = Weighted(trellis, [stage.costs[:, 0] for stage in trellis.stages])
    found = list(weighted.in_order())
    assert [cost for cost, _ in found] == pytest.approx(costs)
    for cost, path in found[:20]:
        plan = Plan(graph, world, trellis.choices(path))
        assert cost == pytest.approx(cost_of(plan, options))
        assert trellis.path(plan.layers) == path
    assert weighted.cheapest == pytest.approx(costs[0])


@pytest.mark.slow
@settings(max_examples=25)
@given(graph=convolutions())
def test_nets_of_convolutions(graph):
    check_all(graph, 2)


@settings(max_examples=6)
@given(graph=convolutions(most=1))
def test_groups_of_several_sizes(graph):
    check_all(graph, 4)


@settings(max_examples=10)
@given(graph=tokens())
def test_transformers(graph):
    check_all(graph, 2)


@pytest.mark.parametrize("graph", [graphs.vgg(), graphs.mlp(6, 8, 4)], ids=["vgg", "mlp"])
def test_unequal_shares(graph):
    check_all(graph, 2, {2: [(3.0, 1.0)]})


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["Fused", "Gated", "Masked", "NormedTogether", "TurnedAndFused"])
def test_what_is_cut_by_heads(inner):
    graph = trace(heads.made(inner), input_shape=(heads.TOKENS,), vocabulary=heads.VOCABULARY)
    check_all(graph, 2)
    check_all(graph, 2, {2: [(3.0, 1.0)]})
