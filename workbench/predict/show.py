"""Predictions as tables of text, and as HTML that also reads well without a kernel."""

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.plan.io.html import Markup, element, shortened, table, text_table
from workbench.predict.memory.memory import Memory
from workbench.predict.memory.timeline import CATEGORIES
from workbench.predict.time.simulation import PARTS, Simulation
from workbench.predict.traffic.traffic import Traffic

MIB = 2**20
_MEMORY = ("rank", "peak MiB", *(name.replace("_", " ") for name in CATEGORIES), "when")
_TRAFFIC = ("collective", "phase", "of", "calls", "messages", "kB received")
_TIME = ("rank", "step ms", *PARTS)
_LINES = 40


@dataclass(frozen=True)
class PredictionDisplay:
    """The contents of a prediction's display.

    Attributes:
        title: the title, in one line.
        memory: the memory of a step.
        traffic: the traffic of a step.
        simulation: the simulation of a step; None without a machine.
        underestimated: the names of layers that take longer than predicted.
    """

    title: str
    memory: Memory
    traffic: Traffic
    simulation: Simulation | None = None
    underestimated: tuple[str, ...] = ()

    def text(self) -> str:
        """All tables as text."""
        tables = []
        if self.simulation is not None:
            tables.append(text_table(_TIME, _time(self.simulation)))
        tables.append(text_table(_MEMORY, _memory(self.memory)))
        tables.append(text_table(_TRAFFIC, _traffic(self.traffic)))
        return "\n\n".join([self.title, *map("\n".join, tables), *self._notes()])

    def html(self) -> Markup:
        """All tables as HTML, with the timeline as a picture."""
        heading, _, rest = self.title.strip("<>").partition(": ")
        parts = []
        if self.simulation is not None:
            caption = "Where a step's time goes, ms"
            parts.append(self.simulation.schedule.svg())
            parts.append(table(_TIME, _time(self.simulation), caption))
        caption = "Memory at the highest point, MiB"
        parts.append(table(_MEMORY, _memory(self.memory), caption))
        caption = "Received in a step, by the rank that receives most"
        parts.append(table(_TRAFFIC, _traffic(self.traffic), caption))
        parts += [element("p", note) for note in self._notes()]
        return element("div", element("p", element("b", heading), f": {rest}."), *parts)

    def _notes(self) -> list[str]:
        """Warnings that a reader needs to judge the figures."""
        notes = []
        if self.memory.guessed:
            named = _named(self.memory.guessed)
            notes.append(
                f"Too little, perhaps: what {named} keep for their backward pass is not known."
            )
        least, most = self.memory.band
        if least < most:
            notes.append(
                f"Between {least / MIB:,.1f} and {most / MIB:,.1f} MiB at most: what kernels of "
                f"{_named(self.memory.unmeasured)} take beside their tensors is not measured. "
                "Machine.local(plan) and cluster.calibrate(plan) measure it."
            )
        if self.simulation is None:
            return notes
        if self.simulation.estimated:
            named = _named(self.simulation.estimated)
            notes.append(f"Estimated, for the machine has not measured such shapes: {named}.")
        if self.underestimated:
            named = _named(self.underestimated)
            notes.append(f"Too little: FLOPs of {named} are not known, and their time is left out.")
        sums = [
            f"{what} by {' or '.join(name.replace('_', '-') for name in names)}"
            for what, names in self.simulation.algorithms.items()
        ]
        if sums:
            notes.append(f"All-reduces: {'; '.join(sums[:6])}.")
        return notes


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _time(simulation: Simulation) -> list[tuple[str, ...]]:
    schedule = simulation.schedule
    rows: list[tuple[str, ...]] = []
    for rank in range(min(_LINES, schedule.world_size)):
        parts = schedule.breakdown(rank)
        sizes = (sum(parts.values()), *parts.values())
        rows.append((str(rank), *(f"{seconds * 1e3:,.3f}" for seconds in sizes)))
    return shortened(rows, schedule.world_size, "ranks")


def _memory(memory: Memory) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for rank in memory.ranks[:_LINES]:
        sizes = (rank.peak_bytes, *rank.categories.values())
        rows.append((str(rank.rank), *(f"{n / MIB:,.1f}" for n in sizes), str(rank.moment)))
    return shortened(rows, len(memory.ranks), "ranks")


def _traffic(traffic: Traffic) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for one in traffic.collectives[:_LINES]:
        often = "" if one.every == 1 else f" every {one.every} steps"
        counts = (f"{max(one.calls):,}", f"{max(one.messages):,}", f"{max(one.bytes) / 1e3:,.1f}")
        rows.append((one.op, one.phase + often, one.layer, *counts))
    return shortened(rows, len(traffic.collectives), "collectives")
