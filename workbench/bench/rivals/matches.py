"""A match: systems that run interleaved with the workbench on one cluster, round by round."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from workbench.bench.plot import Bar
from workbench.bench.report import Cell
from workbench.bench.rivals.interleaved import Measured
from workbench.client.cluster import Cluster
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.graph.graph import Graph

MIB = 2**20


@dataclass(frozen=True)
class Match:
    """Systems that run interleaved with the workbench.

    Attributes:
        part: the name of the part.
        engines: the number of engines.
        rivals: the rivals; of several in one place, the one that was fastest in the first round.
        seconds: the seconds that a round takes, roughly.
    """

    part: str
    engines: int
    rivals: Sequence[Sequence[str]]
    seconds: float


@dataclass
class Found:
    """What all rounds of a match have found.

    Attributes:
        samples: the samples of a step, by system.
        seconds: the seconds of a step in each round, by system.
        peaks: the peak bytes of a rank, the most of all, by system.
        losses: the loss of the last step, by system.
    """

    samples: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)

    def add(self, ranks: Sequence[Measured]) -> None:
        """Adds a round, as each rank has measured it."""
        self.samples |= ranks[0].samples
        for name, seconds in ranks[0].seconds.items():
            self.seconds.setdefault(name, []).extend(seconds)
            most = max(rank.peak_bytes[name] for rank in ranks)
            self.peaks[name] = max(most, self.peaks.get(name, 0))
            self.losses[name] = sum(rank.losses.get(name, 0.0) for rank in ranks)

    @property
    def speeds(self) -> dict[str, list[float]]:
        """The samples per second in each round, by system."""
        return {
            name: [self.samples[name] / seconds for seconds in taken]
            for name, taken in self.seconds.items()
        }


def measured(
    cluster: Cluster,
    experiment: Experiment,
    module: nn.Module | None,
    rivals: Sequence[Sequence[str]],
    steps: int,
) -> list[Measured]:
    """One round of the workbench and of its rivals, as each rank has measured it.

    Args:
        cluster: the engines.
        experiment: the experiment that the workbench runs, and its rivals by their own means.
        module: the model, unless it is torchvision's.
        rivals: the rivals; of several in one place, each is tried, and the fastest takes part.
        steps: the steps of each system.
    """
    found: list[Measured] = cluster.call(
        "workbench.bench.rivals.interleaved:measure",
        experiment,
        module=module,
        steps=steps,
        rivals=rivals,
    )
    return found


def rows_of(graph: Graph, ranks: int, k: int, found: Found) -> list[dict[str, Cell]]:
    """A row of the report for each system.

    Args:
        graph: the model.
        ranks: the number of engines.
        k: the size of the workbench's groups.
        found: the measurements.
    """
    return [
        {
            "system": name,
            "model": graph.source.name,
            "engines": ranks,
            "group": k if name == "workbench" else "",
            "samples/s": statistics.median(values),
            "min": min(values),
            "max": max(values),
            "peak MiB per rank": found.peaks[name] / MIB,
            "loss": found.losses[name],
        }
        for name, values in found.speeds.items()
    ]


def bars_of(rows: Sequence[Mapping[str, Cell]], name: str) -> tuple[Bar, ...]:
    """A bar for the speed of each system.

    Args:
        rows: rows of `rows_of`.
        name: how a row is called, with its own columns: "{system}, {model}".
    """
    return tuple(
        Bar(
            name.format_map(row),
            float(row["samples/s"]),
            float(row["min"]),
            float(row["max"]),
            row["system"] == "workbench",
        )
        for row in rows
    )
