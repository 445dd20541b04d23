"""Modules as people write them, times plans, times experiments: what hypothesis draws."""

import re
from textwrap import dedent
from typing import Any

import torch
from hypothesis import strategies as st

from tests.oracle import blocks
from tests.oracle.cases import CLASSES, REFUSALS, Case, Cut, Run, graph_of
from tests.oracle.models import Net
from workbench.plan.graph import Graph
from workbench.plan.rules import schemes_of

SHAPES: tuple[tuple[int, ...], ...] = (
    (8,), (6,), (1, 6, 6), (2, 8, 8), (3, 6, 6), (4, 8), (3, 4), (2, 9), (2, 4, 4, 4),
)  # fmt: skip
# A two-dimensional sample is tokens or a signal, as one likes.
BY_NDIM = {
    1: blocks.VECTORS,
    2: {**blocks.SIGNALS, **{f"{name} of tokens": b for name, b in blocks.TOKENS.items()}},
    3: blocks.IMAGES,
    4: blocks.VOLUMES,
}
# These are mostly refused, by right: a few are enough.
RARE = ("mixing", "counter", "functional norm")
MOST_ELEMENTS = 400
_CHOICE = re.compile(r"«([^«»]*)»")


class _Writer:
    """Writes one module down, block after block."""

    def __init__(self, draw: Any, shape: tuple[int, ...]) -> None:
        self.draw, self.input, self.shape = draw, shape, shape
        self.init: list[str] = []
        self.forward: list[str] = []
        self.count = 0

    def net(self, head: str = "x") -> Net:
        return Net(self.input, tuple(self.init), tuple(self.forward), head)

    def block(self, depth: int = 0) -> bool:
        """Writes a block, unless it does not fit: whether it did."""
        before = list(self.init), list(self.forward), self.shape
        if depth == 0 and self.draw(st.integers(0, 4)) == 0:
            text = blocks.AROUND[self.draw(st.sampled_from(sorted(blocks.AROUND)))]
        else:
            own = BY_NDIM.get(len(self.shape), {})
            pool = own if own and self.draw(st.integers(0, 2)) else blocks.ANY
            name = self.draw(st.sampled_from(sorted(pool)))
            if name in RARE and self.draw(st.integers(0, 4)):
                return False
            text = pool[name]
        self._write(text, depth)
        found = self._given()
        if found is None or found.numel() // 4 > MOST_ELEMENTS or found.ndim < 2:
            self.init, self.forward, self.shape = before
            return False
        self.shape = tuple(found.shape[1:])
        return True

    def _write(self, text: str, depth: int) -> None:
        self.count += 1
        names = self._names()
        init, _, forward = dedent(self._chosen(text)).strip("\n").rpartition("---")
        self.init += [line.format(**names) for line in init.splitlines() if line.strip()]
        for line in dedent(forward).splitlines():
            if line.strip() == "@":
                self._inside(depth)
            elif line.strip():
                self.forward.append(line.format(**names))

    def _inside(self, depth: int) -> None:
        for _ in range(self.draw(st.integers(1, 2))):
            self.block(depth + 1)

    def _chosen(self, text: str) -> str:
        text = re.sub(r"¦\n\s*", "¦", text)
        text = re.sub(r"\n\s*(«?,)", r"\1", text)
        while found := _CHOICE.search(text):
            options = found.group(1).split("¦")
            text = text[: found.start()] + self.draw(st.sampled_from(options)) + text[found.end() :]
        return text

    def _names(self) -> dict[str, Any]:
        shape = self.shape
        width = shape[-1] if len(shape) == 2 else shape[0]
        return dict(
            m=f"m{self.count}",
            c=width,
            o=self.draw(st.sampled_from((4, 6, 8, 3))),
            t=shape[0],
            t_half=max(1, shape[0] // 2),
            last=shape[-1],
            sample=", ".join(map(str, shape)),
            half=max(1, width // 2),
        )

    def _given(self) -> torch.Tensor | None:
        """What the module gives for four samples, in both modes; None where torch refuses."""
        try:
            module = self.net().build()
            with torch.no_grad(), torch.random.fork_rng(devices=()):
                found = module(torch.randn(4, *self.input))
                evaluated = module.eval()(torch.randn(4, *self.input))
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, KeyError):
            return None
        if found.shape != evaluated.shape or len(found) != 4 or not found.isfinite().all():
            return None
        return found


@st.composite
def nets(draw: Any) -> Net:
    """A module of four to ten blocks that torch runs, with a head of classes."""
    writer = _Writer(draw, draw(st.sampled_from(SHAPES)))
    for _ in range(draw(st.integers(2, 7))):
        writer.block()
    if len(writer.shape) > 1:
        writer.forward.append("x = torch.flatten(x, 1)")
    width = torch.Size(writer.shape).numel()
    head = draw(st.sampled_from((f"nn.Linear({width}, {CLASSES})",) * 3 + (
        f"nn.Linear({width}, {CLASSES}, bias=False)",
        f"nn.Sequential(nn.Linear({width}, 6), nn.ReLU(), nn.Linear(6, {CLASSES}))",
        f"nn.Sequential(nn.Linear({width}, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, {CLASSES}))",
    )))  # fmt: skip
    writer.init.append(f"self.head = {head}")
    writer.forward.append("x = self.head(x)")
    return writer.net()


def _shares(draw: Any, count: int) -> tuple[float, ...]:
    drawn = [draw(st.integers(0, 3)) for _ in range(count)]
    return tuple(drawn) if any(drawn) else (1, *drawn[1:])


def _cut(draw: Any, graph: Graph, world: int) -> Cut:
    layers = []
    sizes = [k for k in range(1, world + 1) if world % k == 0]
    for layer in graph.layers:
        schemes = schemes_of(layer)
        if not schemes or layer.name in graph.shares_weights or draw(st.booleans()):
            continue
        scheme = draw(st.sampled_from(schemes))
        if scheme == "replicate":
            continue
        k = draw(st.sampled_from(sizes[::-1]))
        cut = scheme.startswith("shard") and draw(st.booleans())
        layers.append((layer.name, scheme, k, _shares(draw, k) if cut else None))
    seen = [layer.name for layer in graph.layers if layer.rows]
    recompute: tuple[str, ...] = ()
    if seen and draw(st.integers(0, 2)) == 0:
        first = draw(st.integers(0, len(seen) - 1))
        recompute = tuple(seen[first : first + draw(st.integers(1, 4))])
    rows = _shares(draw, world) if draw(st.booleans()) else None
    rounds = draw(st.sampled_from(("BK", "BK", "BK", "B", "B/K")))
    local = rounds == "BK" and draw(st.integers(0, 2)) == 0
    return _possible(graph, Cut(world, tuple(layers), recompute, rows, rounds, local))


def _possible(graph: Graph, cut: Cut) -> Cut:
    """The same without what the library refuses by rule: rounds, and recomputation in place."""
    for left_out in ({}, {"rounds": "BK"}, {"recompute": ()}, {"rounds": "BK", "recompute": ()}):
        other = Cut(**{**vars(cut), **left_out})
        try:
            other.of(graph)
        except REFUSALS:
            continue
        return other
    return cut


OPTIMIZERS = (
    "SGD(lr=0.1)", "SGD(lr=0.05, momentum=0.9)", "SGD(lr=0.05, momentum=0.9, nesterov=True)",
    "SGD(lr=0.05, momentum=0.5, weight_decay=0.1)", "Adam(lr=0.01)",
    "Adam(lr=0.01, weight_decay=0.1)", "AdamW(lr=0.01, weight_decay=0.2)",
)  # fmt: skip


def _run(draw: Any, world: int) -> Run:
    sync = draw(
        st.sampled_from(
            ("Synchronous()",) * 4
            + (
                "Synchronous(algorithm='direct')",
                "Synchronous(algorithm='ring', bucket_bytes=64)",
                "Synchronous(bucket_bytes=200)",
                "Pipelined(width=1)",
                "Pipelined(width=2)",
                "Pipelined(width=2, warmup=1)",
                f"ParameterServer(server={world - 1})",
                "LocalSGD(every=1)",
            )
        )
    )
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    shard: bool | tuple[float, ...] = False
    if sync.startswith("LocalSGD"):
        optimizer = "SGD(lr=0.1)"
    elif not sync.startswith("Parameter") and draw(st.integers(0, 3)) == 0:
        shard = draw(st.sampled_from((True, tuple(range(1, world + 1)))))
    return Run(
        batch_size=draw(st.integers(5, 13)),
        samples=draw(st.integers(14, 24)),
        steps=draw(st.integers(2, 3)),
        optimizer=optimizer,
        sync=sync,
        precision=draw(st.sampled_from(("fp64",) * 6 + ("fp32", "bf16"))),
        accumulate=draw(st.sampled_from((1, 1, 1, 2, 3))),
        shard=shard,
        seed=draw(st.integers(0, 3)),
        checkpoint_every=draw(st.sampled_from((None, None, 1, 2))),
        evaluate_every=draw(st.sampled_from((None, None, 1, 2))),
    )


@st.composite
def cases(draw: Any) -> Case:
    """A module, a plan that it can have, an experiment, and a way to run them."""
    net = draw(nets())
    try:
        graph = graph_of(net)
    except Exception:
        return Case(net)  # refused, or wrong: that is for the judge to say
    world = draw(st.integers(1, 4))
    cut, run = _cut(draw, graph, world), _run(draw, world)
    way = draw(st.sampled_from(("straight",) * 5 + ("again", "resumed", "resumed", "re-cut")))
    then = None
    if way == "re-cut" or (way == "resumed" and draw(st.booleans())):
        then = _cut(draw, graph, world)
        then = Cut(**{**vars(then), "local": cut.local})
        if cut.local:
            then = Cut(**{**vars(cut), "rows": then.rows})
    if way != "straight":
        run = Run(**{**vars(run), "checkpoint_every": 1, "evaluate_every": 1})
    if sync_is_local(run) and way != "straight":
        way, then = "straight", None
    return Case(net, cut, run, way, then)


def sync_is_local(run: Run) -> bool:
    return run.sync.startswith("LocalSGD")
