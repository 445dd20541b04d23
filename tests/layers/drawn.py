"""What hypothesis draws for plans."""

from hypothesis import strategies as st

from tests.layers import nets
from workbench.plan.placement.placement import apportion
from workbench.plan.placement.schemes import schemes_of
from workbench.plan.plans.plan import Plan

GRAPHS = nets.Graphs()


@st.composite
def shares(draw, count):
    """Relative sizes for `count` ranks: zeros welcome, but not everywhere."""
    drawn = [draw(st.integers(0, 3)) for _ in range(count)]
    return tuple(drawn) if any(drawn) else (1, *drawn[1:])


@st.composite
def plans(draw, net, world=None, graphs=GRAPHS):
    """Any scheme, group size and shares for every layer that can be split, on 1 to 4 ranks."""
    graph = graphs[net]
    world = draw(st.integers(1, 4)) if world is None else world
    plan = Plan.data_parallel(graph, world).with_batch_norm("synchronized")
    sizes = [k for k in range(1, world + 1) if world % k == 0]
    for layer in graph.layers:
        if not schemes_of(layer):
            continue
        scheme = draw(st.sampled_from(schemes_of(layer)))
        k = 1 if scheme == "replicate" else draw(st.sampled_from(sizes))
        cut_by = draw(shares(k)) if scheme.startswith("shard") and draw(st.booleans()) else None
        plan = plan.with_layer(layer.name, scheme=scheme, group_size=k, shares=cut_by)
    return plan, apportion(draw(st.integers(4, 7)), draw(shares(world)))
