"""Small nets with branches that join again, as hypothesis draws them."""

from hypothesis import strategies as st

from tests.plan.graphs import Builder
from workbench.plan.graph.graph import Graph

_FOLLOWERS = ("elementwise", "dropout", "pool", "batch_norm", "op", "layer_norm")


@st.composite
def convolutions(draw, most=3) -> Graph:
    """Some convolutions of one shape, what may lie between, sums of branches, a classifier."""
    builder = Builder((4, 4, 4)).conv("conv0", 4)
    count = draw(st.integers(1, most))
    for index in range(1, count + 1):
        before = builder.last
        for place in range(draw(st.integers(0, 2))):
            kind = draw(st.sampled_from(_FOLLOWERS))
            name = f"{kind}{index}{place}"
            builder.norm(name) if kind == "batch_norm" else builder.same(name, kind)
        if index < count or draw(st.booleans()):
            builder.conv(f"conv{index}", 4, groups=draw(st.sampled_from((1, 1, 2))))
        if draw(st.booleans()):
            kind = draw(st.sampled_from(("add", "mul")))
            builder.same(f"{kind}{index}", kind, *draw(st.permutations((before, builder.last))))
    if draw(st.booleans()):
        builder.same("relu", "elementwise")
    return builder.add("flatten", "flatten", (64,)).linear("fc", 6).graph()


@st.composite
def tokens(draw) -> Graph:
    """A transformer's block with residuals."""
    builder = Builder((3, 4)).linear("embed", 4)
    stream = builder.last
    if draw(st.booleans()):
        builder.same("norm", "layer_norm")
    builder.attention("attention", 2)
    if draw(st.booleans()):
        builder.same("drop", "dropout")
    builder.same("add", "add", builder.last, stream)
    stream = builder.last
    builder.linear("up", 8).same("gelu", "elementwise").linear("down", 4)
    return builder.same("join", "add", stream, builder.last).add("pick", "op", (4,)).graph()
