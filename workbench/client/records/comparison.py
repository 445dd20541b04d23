"""Runs beside each other: what was different in them, and what each came to."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.client.records.curves import figure_panels, loss_panel
from workbench.client.records.runs import (
    beside,
    fields_of,
    layer_differences,
    short,
    varied,
)
from workbench.client.run.run import Run
from workbench.plan.display import svg
from workbench.plan.display.panels import document
from workbench.plan.io.html import Markup, element, save, table, text_table
from workbench.plan.io.units import digits, duration, percent, size
from workbench.store.run_folder import last_evaluation

if TYPE_CHECKING:
    import pandas

_OWN = ("submitted", "started", "ended", "seed")  # of each run, or told with its configuration


@dataclass(frozen=True)
class RunComparison:
    """Runs beside each other; made by `compare_runs`.

    Attributes:
        runs: the runs, by name.
    """

    runs: Mapping[str, Run]

    @cached_property
    def configuration(self) -> list[dict[str, Any]]:
        """The fields of each run's experiment that are not the same in all, and layers."""
        experiments = [run.experiment for run in self.runs.values()]
        told = [
            {
                "model": each.plan.graph.source.name,
                "parameters": each.plan.graph.parameters,
                "plan": short(each.plan),
                **fields_of(each),
            }
            for each in experiments
        ]
        layers = layer_differences([each.plan for each in experiments])
        return [own | lying for own, lying in zip(varied(told), layers, strict=True)]

    @cached_property
    def environments(self) -> list[dict[str, str]]:
        """The versions and the hardware that are not the same in all."""
        found = [run.environment for run in self.runs.values()]
        told = [
            {} if each is None else {n: v for n, v in each.lines() if n not in _OWN}
            for each in found
        ]
        return varied(told)

    @cached_property
    def figures(self) -> list[dict[str, Any]]:
        """What each run came to: losses, metrics, speed, time and memory; NaN: not measured."""
        return [_figures(run) for run in self.runs.values()]

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each run: what is its own, and what it came to."""
        import pandas  # only here: it takes long to load

        parts = zip(self.configuration, self.environments, self.figures, strict=True)
        rows = [{**beside(own, came), **ran, **came} for own, ran, came in parts]
        return pandas.DataFrame(rows, index=pandas.Index(self.runs, name="run"))

    def svg(self) -> str:
        """The curves of all runs as one picture, a document of its own."""
        metrics = {name: run.metrics for name, run in self.runs.items()}
        evaluations = {name: run.evaluations for name, run in self.runs.items()}
        panels = [loss_panel(metrics, width=860), *figure_panels(evaluations, width=860)]
        return document(panels, columns=1)

    def save(self, path: str | Path) -> None:
        """Writes it into a file: "x.html" is a page, "x.svg" the curves, "x.csv" the table.

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path, self.svg)

    def __repr__(self) -> str:
        lines = [f"<RunComparison of {', '.join(self.runs)}>"]
        for what, rows in self._tables():
            lines += ["", *text_table((what, *self.runs), rows)]
        return "\n".join(lines)

    def _repr_html_(self) -> Markup:
        names = ", ".join(self.runs)
        return element(
            "div",
            element("p", element("b", "Comparison"), f": {names}"),
            svg.image(self.svg(), f"Loss and accuracy by step of {names}"),
            *(table((what, *self.runs), rows) for what, rows in self._tables()),
        )

    def _tables(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        shown = [_shown(each) for each in self.figures]
        parts = {
            "configuration": _rows(self.configuration),
            "environment": _rows(self.environments),
            "result": _rows(shown),
        }
        return [(what, rows) for what, rows in parts.items() if rows]


def compare_runs(*runs: Run | str | Path) -> RunComparison:
    """Sets runs beside each other: fields that differ, final figures, and curves.

    Args:
        runs: two runs or more, or their folders.

    Raises:
        TypeError: something else.
        ValueError: fewer than two.
        ClusterError: a folder is no run's.
    """
    if len(runs) < 2:
        raise ValueError(f"two runs or more can be compared, got {len(runs)}")
    named: dict[str, Run] = {}
    for each in runs:
        if not isinstance(each, Run | str | Path):
            raise TypeError(f"runs or their folders are compared, got {type(each).__name__}")
        run = each if isinstance(each, Run) else Run.load(each)
        name, count = run.directory.name, 1
        while name in named:
            count += 1
            name = f"{run.directory.name} ({count})"
        named[name] = run
    return RunComparison(named)


def _figures(run: Run) -> dict[str, Any]:
    metrics, environment = run.metrics, run.environment
    first = metrics[metrics["rank"] == 0]
    return {
        "state": run.state,
        "steps": int(first["step"].iloc[-1]) + 1 if len(first) else 0,
        "loss": float(first["loss"].iloc[-1]) if len(first) else math.nan,
        **last_evaluation(run.directory),
        "samples_per_s": float(first["samples_per_s"].median()) if len(first) else math.nan,
        "wall_s": math.nan if environment is None else environment.times.wall_s,
        "peak_bytes": float(metrics["peak_bytes"].max()) if len(metrics) else math.nan,
    }


def _shown(figures: Mapping[str, Any]) -> dict[str, str]:
    wall_s = figures["wall_s"]
    tested = {n: digits(v) for n, v in figures.items() if n.startswith("test_")}
    if "accuracy" in figures:
        tested["test accuracy"] = percent(figures["accuracy"])
    return {
        "state": figures["state"],
        "steps": f"{figures['steps']:,}",
        "loss": digits(figures["loss"]),
        **{name.replace("_", " ", 1): said for name, said in tested.items()},
        "samples/s, median": digits(figures["samples_per_s"]),
        "wall time": "–" if math.isnan(wall_s) else duration(wall_s),
        "peak memory of a rank": size(figures["peak_bytes"]),
    }


def _rows(columns: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A line for each name, a cell for each run; "–" where it has none."""
    names = dict.fromkeys(name for each in columns for name in each)
    return [
        (name, *("–" if each.get(name) is None else str(each[name]) for each in columns))
        for name in names
    ]
