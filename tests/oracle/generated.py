"""Modules as people write them, times plans, times experiments.

Written with dice, which hypothesis throws in the tests (and then makes what fails small), and a
plain generator of random numbers where each case is to be independent of all others.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import dedent
from typing import Any, Protocol

import torch
from hypothesis import strategies as st

from tests.oracle import blocks
from tests.oracle.cases import CLASSES, REFUSALS, Case, Cut, Run, graph_of
from tests.oracle.losses import LOSSES
from tests.oracle.models import Net
from tests.oracle.opaque import DATA, MORE_LOSSES, WRONG_DATA, WRONG_LOSSES
from workbench.plan.graph.graph import Graph
from workbench.plan.placement.schemes import schemes_of

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
RARE = ("mixing", "counter", "state", "functional norm", "instance norm with statistics")
SELDOM = 12
MOST_ELEMENTS = 400
_CHOICE = re.compile(r"«([^«»]*)»")


class Dice(Protocol):
    """Whatever decides."""

    def one(self, options: Sequence[Any]) -> Any:
        """One of the options."""
        ...


@dataclass(frozen=True)
class Drawn:
    """Decides as hypothesis says."""

    draw: Any

    def one(self, options: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(options))


@dataclass(frozen=True)
class Thrown:
    """Decides at random."""

    numbers: random.Random

    def one(self, options: Sequence[Any]) -> Any:
        return self.numbers.choice(options)


@st.composite
def cases(draw: Any) -> Case:
    """Cases, as hypothesis draws them."""
    return case_of(Drawn(draw))


def numbered(seed: int, number: int) -> Case:
    """The case of this number under a seed, whichever others are made."""
    return case_of(Thrown(random.Random(f"{seed}/{number}")))


def case_of(dice: Dice) -> Case:
    """A module, a plan that it can have, an experiment, and a way to run them."""
    net = _net(dice)
    try:
        graph = graph_of(net)
    except Exception:
        return Case(net)  # refused, or wrong: that is for the judge to say
    world = dice.one((1, 2, 2, 3, 3, 4, 4))
    cut, run = _cut(dice, graph, world), _run(dice, world)
    way = dice.one(("straight",) * 5 + ("again", "resumed", "resumed", "re-cut"))
    if way == "straight" or run.sync.startswith("LocalSGD"):
        return Case(net, cut, run)
    then = None
    if way == "re-cut" or (way == "resumed" and dice.one((True, False))):
        other = _cut(dice, graph, world)
        # What local batch norms compute depends on the plan, but for its rows.
        then = replace(cut, rows=other.rows) if cut.local else replace(other, local=False)
    return Case(net, cut, replace(run, checkpoint_every=1, evaluate_every=1), way, then)


def _net(dice: Dice) -> Net:
    """A module of some blocks that torch runs, with a head of classes."""
    writer = _Writer(dice, dice.one(SHAPES))
    for _ in range(dice.one(range(2, 8))):
        writer.block()
    if len(writer.shape) > 1:
        writer.forward.append("x = torch.flatten(x, 1)")
    width = torch.Size(writer.shape).numel()
    last = f"nn.Linear(8, {CLASSES})"
    head = dice.one(
        (f"nn.Linear({width}, {CLASSES})",) * 3
        + (
            f"nn.Linear({width}, {CLASSES}, bias=False)",
            f"nn.Sequential(nn.Linear({width}, 8), nn.ReLU(), {last})",
            f"nn.Sequential(nn.Linear({width}, 8), nn.GELU(), nn.Dropout(0.2), {last})",
        )
    )
    writer.init.append(f"self.head = {head}")
    if dice.one(range(8)) == 0:
        return _with_outputs(dice, writer, width)
    writer.forward.append("x = self.head(x)")
    return writer.net()


def _with_outputs(dice: Dice, writer: "_Writer", width: int) -> Net:
    """A module that returns features, or scores of an auxiliary head, beside its own."""
    writer.init.append(f"self.aux = nn.Linear({width}, {CLASSES})")
    returns, roles = dice.one(
        (
            ("self.head(x), self.aux(x)", ("prediction", "auxiliary")),
            ("x, self.head(x)", ("unused", "prediction")),
            ("x, self.head(x), self.aux(x)", ("unused", "prediction", "auxiliary")),
            ("(self.head(x), self.aux(x)) if self.training else self.head(x)",
             ("prediction", "auxiliary")),
        )
    )  # fmt: skip
    return replace(writer.net(), returns=returns, roles=roles)


class _Writer:
    """Writes one module down, block after block."""

    def __init__(self, dice: Dice, shape: tuple[int, ...]) -> None:
        self.dice, self.input, self.shape = dice, shape, shape
        self.init: list[str] = []
        self.forward: list[str] = []
        self.count = 0

    def net(self) -> Net:
        return Net(self.input, tuple(self.init), tuple(self.forward))

    def block(self, depth: int = 0) -> None:
        """Writes a block, unless it does not fit."""
        before = list(self.init), list(self.forward), self.shape
        if depth == 0 and self.dice.one(range(5)) == 0:
            pool = blocks.AROUND
        else:
            own = BY_NDIM.get(len(self.shape), {})
            pool = self.dice.one((own or blocks.ANY, own or blocks.ANY, blocks.ANY))
        name = self.dice.one(sorted(pool))
        if name in RARE and self.dice.one(range(SELDOM)):
            return
        self._write(pool[name], depth)
        found = self.net().runs()
        if found is None or found[0][0].numel() > MOST_ELEMENTS or found[0].ndim < 2:
            self.init, self.forward, self.shape = before
            return
        self.shape = tuple(found[0].shape[1:])

    def _write(self, text: str, depth: int) -> None:
        self.count += 1
        names = self._names()
        init, _, forward = dedent(self._chosen(text)).strip("\n").rpartition("---")
        self.init += [line.format(**names) for line in init.splitlines() if line.strip()]
        for line in dedent(forward).splitlines():
            if line.strip() == "@":
                for _ in range(self.dice.one((1, 2))):
                    self.block(depth + 1)
            elif line.strip():
                self.forward.append(line.format(**names))

    def _chosen(self, text: str) -> str:
        """The text after all choices; a line that goes on is one with the next."""
        text = re.sub(r"¦\n\s*", "¦", text)
        text = re.sub(r"\n\s*(«?,)", r"\1", text)
        while found := _CHOICE.search(text):
            chosen = self.dice.one(found.group(1).split("¦"))
            text = text[: found.start()] + chosen + text[found.end() :]
        return text

    def _names(self) -> dict[str, Any]:
        shape = self.shape
        width = shape[-1] if len(shape) == 2 else shape[0]
        return dict(
            m=f"m{self.count}",
            c=width,
            o=self.dice.one((4, 6, 8, 3)),
            t=shape[0],
            t_half=max(1, shape[0] // 2),
            last=shape[-1],
            sample=", ".join(map(str, shape)),
            half=max(1, width // 2),
        )


def _shares(dice: Dice, count: int) -> tuple[float, ...]:
    found = tuple(dice.one((0, 1, 2, 3)) for _ in range(count))
    return found if any(found) else (1, *found[1:])


def _cut(dice: Dice, graph: Graph, world: int) -> Cut:
    layers = []
    sizes = [k for k in range(1, world + 1) if world % k == 0]
    for layer in graph.layers:
        schemes = schemes_of(layer)
        if not schemes or layer.name in graph.shares_weights or dice.one((True, False)):
            continue
        scheme = dice.one(schemes)
        if scheme == "replicate":
            continue
        k = dice.one(sizes[::-1])
        cut = scheme.startswith("shard") and dice.one((True, False))
        layers.append((layer.name, scheme, k, _shares(dice, k) if cut else None))
    seen = [layer.name for layer in graph.layers if layer.rows]
    recompute: tuple[str, ...] = ()
    if seen and dice.one(range(3)) == 0:
        first = dice.one(range(len(seen)))
        recompute = tuple(seen[first : first + dice.one((1, 2, 3, 4))])
    rows = _shares(dice, world) if dice.one((True, False)) else None
    rounds = dice.one(("BK", "BK", "BK", "B", "B/K"))
    local = rounds == "BK" and dice.one(range(3)) == 0
    groups = {k for _, _, k, _ in layers} - {1}
    tokens: bool | tuple[float, ...] = bool(groups) and dice.one((True, False))
    if tokens and len(groups) == 1:
        tokens = dice.one((True, _shares(dice, *groups)))
    return _possible(graph, Cut(world, tuple(layers), recompute, rows, rounds, local, tokens))


def _possible(graph: Graph, cut: Cut) -> Cut:
    """The same without what the library refuses by rule: rounds, and recomputation in place."""
    for left_out in ({}, {"rounds": "BK"}, {"recompute": ()}, {"rounds": "BK", "recompute": ()}):
        other = replace(cut, **left_out)
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
SYNCS = (
    *("Synchronous()",) * 4,
    "Synchronous(algorithm='direct')", "Synchronous(algorithm='ring', bucket_bytes=64)",
    "Synchronous(bucket_bytes=200)", "Pipelined(width=1)", "Pipelined(width=2)",
    "Pipelined(width=2, warmup=1)", "ParameterServer(server=LAST)", "LocalSGD(every=1)",
)  # fmt: skip


def _run(dice: Dice, world: int) -> Run:
    sync = dice.one(SYNCS).replace("LAST", str(world - 1))
    optimizer = dice.one(OPTIMIZERS)
    shard: bool | tuple[float, ...] = False
    if sync.startswith("LocalSGD"):
        optimizer = OPTIMIZERS[0]
    elif not sync.startswith("Parameter") and dice.one(range(4)) == 0:
        shard = dice.one((True, tuple(range(1, world + 1))))
    precision = dice.one(("fp64",) * 6 + ("fp32", "bf16"))
    if precision == "bf16" and sync.startswith(("Synchronous", "Parameter", "Pipelined(width=1")):
        precision = dice.one(("bf16", "fp16"))
    if precision in ("bf16", "fp16") and not sync.startswith("LocalSGD"):
        # Adam's steps are the gradient's sign, which the rounding of halves turns.
        optimizer = dice.one([each for each in OPTIMIZERS if each.startswith("SGD")])
    return Run(
        batch_size=dice.one(range(5, 14)),
        samples=dice.one(range(14, 25)),
        steps=dice.one((2, 3)),
        optimizer=optimizer,
        sync=sync,
        precision=precision,
        accumulate=dice.one((1, 1, 1, 2, 3)),
        shard=shard,
        seed=dice.one((0, 1, 2, 3)),
        checkpoint_every=dice.one((None, None, 1, 2)),
        evaluate_every=dice.one((None, None, 1, 2)),
        loss=_opaque(dice, (*[None] * 7, *LOSSES, *MORE_LOSSES), WRONG_LOSSES),
        data=_opaque(dice, (*[None] * 30, *DATA), WRONG_DATA),
    )


def _opaque(dice: Dice, right: Sequence[str | None], wrong: Mapping[str, Any]) -> str | None:
    """Seldom one that is to be refused."""
    return dice.one(right) if dice.one(range(SELDOM * 12)) else dice.one(sorted(wrong))
