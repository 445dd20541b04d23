"""An all-reduce's phases on all ranks, to look at."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from workbench.plan.collective.algorithm import Algorithm
from workbench.plan.collective.codec import AnyCodec, as_codec
from workbench.plan.display import svg
from workbench.plan.experiment.experiment import SGD, Experiment, Synchronous, Synthetic
from workbench.plan.experiment.metrics import PHASES, CollectiveTrace
from workbench.plan.extension.extension import name_of
from workbench.plan.graph.graph import Graph, Input, Layer, Source, Weight
from workbench.plan.io.html import Markup, element, frame_html, save
from workbench.plan.io.units import size
from workbench.plan.plans.plan import Plan

# Okabe and Ito's palette: told apart by every kind of color vision.
COLORS = dict(
    zip(
        PHASES,
        ("#cccccc", "#e69f00", "#0072b2", "#f0f0f0", "#009e73", "#cc79a7"),
        strict=True,
    )
)
_WIDTH, _LANE, _GAP, _LEFT, _TOP = 840, 22, 6, 64, 26


@dataclass(frozen=True)
class SumTrace:
    """Where one all-reduce spent its time.

    Attributes:
        what: algorithm, codec and size, for people.
        ranks: each rank's trace; all left a meeting together just before.
    """

    what: str
    ranks: tuple[CollectiveTrace, ...]

    @property
    def seconds(self) -> float:
        """Of the slowest rank."""
        return max(rank.seconds for rank in self.ranks)

    @property
    def phases(self) -> pd.DataFrame:
        """One row for each phase: rank, round, phase, start_s, seconds, bytes."""
        return pd.DataFrame(
            [
                (trace.rank, phase.round, phase.name, phase.start_s, phase.seconds, phase.bytes)
                for trace in self.ranks
                for phase in trace.phases
            ],
            columns=["rank", "round", "phase", "start_s", "seconds", "bytes"],
        )

    @property
    def table(self) -> pd.DataFrame:
        """Seconds of each phase on each rank, and of all together."""
        rows = [
            [trace.rank, *(trace.seconds_of([name]) for name in PHASES), trace.seconds]
            for trace in self.ranks
        ]
        return pd.DataFrame(rows, columns=["rank", *PHASES, "all"])

    def to_frame(self) -> pd.DataFrame:
        """The same as `phases`."""
        return self.phases

    def save(self, path: str | Path) -> None:
        """Writes it into a file: "x.svg" is the timeline, "x.html" a page, "x.csv" the phases.

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path, self.svg)

    def svg(self) -> str:
        """The timeline: a lane for each rank, a bar for each phase."""
        height = _TOP + len(self.ranks) * (_LANE + _GAP) + 44
        scale = (_WIDTH - _LEFT - 8) / self.seconds
        parts = [svg.text(0, 14, self.what)]
        for lane, trace in enumerate(self.ranks):
            y = _TOP + lane * (_LANE + _GAP)
            parts.append(svg.text(0, y + 15, f"rank {trace.rank}"))
            for phase in trace.phases:
                told = f"{phase.name}, round {phase.round}: {1e3 * phase.seconds:.3f} ms"
                told += f", {phase.bytes:,} bytes" if phase.bytes else ""
                x, width = _LEFT + scale * phase.start_s, scale * phase.seconds
                parts.append(svg.rect(x, y, width, _LANE, told, fill=COLORS[phase.name]))
        y = _TOP + len(self.ranks) * (_LANE + _GAP)
        parts.append(svg.text(_LEFT, y + 12, "0"))
        parts.append(svg.text(_WIDTH - 8, y + 12, f"{1e3 * self.seconds:.2f} ms", "end"))
        for place, name in enumerate(PHASES):
            x = _LEFT + 110 * place
            parts.append(svg.rect(x, y + 22, 12, 12, stroke="#999999", fill=COLORS[name]))
            parts.append(svg.text(x + 18, y + 32, name))
        return svg.document(parts, _WIDTH, height, font_family="sans-serif", font_size=12)

    def _repr_html_(self) -> Markup:
        ms = 1e3 * self.table.set_index("rank")
        return element("div", self.svg(), frame_html("In ms", ms.round(3).reset_index(), "ranks"))

    def __repr__(self) -> str:
        slowest = max(self.ranks, key=lambda rank: rank.seconds)
        parts = [(name, slowest.seconds_of([name]) / slowest.seconds) for name in PHASES]
        said = ", ".join(f"{name} {share:.0%}" for name, share in parts if share >= 0.005)
        return f"<SumTrace {self.what}: {1e3 * self.seconds:.2f} ms, {said}>"


def experiment_for(
    world_size: int, algorithm: Algorithm, codec: str | AnyCodec | None
) -> Experiment:
    """What ranks are asked with: only its strategy and its world size matter.

    Raises:
        ValueError: there is no such algorithm or codec, or they do not go together.
    """
    weight = Weight("fc.weight", (2, 1))
    layer = Layer("fc", "linear", ("input",), (1,), (2,), weights=(weight,), node="fc", flops=4)
    graph = Graph(Source("module", "nothing", ()), (Input((1,)),), 2, (layer,), ("fc",))
    return Experiment(
        plan=Plan.data_parallel(graph, world_size),
        data=Synthetic(samples=world_size),
        optimizer=SGD(lr=1.0),
        steps=1,
        sync=Synchronous(algorithm=algorithm, codec=as_codec(codec)),
    )


def described(experiment: Experiment, nbytes: int, ranks: Sequence[CollectiveTrace]) -> SumTrace:
    """The trace of what was asked for."""
    sync = experiment.sync
    assert isinstance(sync, Synchronous)
    coded = f" as {sync.codec.inexact}" if sync.codec is not None else ""
    what = f"all-reduce ({name_of(sync.algorithm)}) of {size(nbytes)}{coded}, {len(ranks)} ranks"
    return SumTrace(what, tuple(ranks))
