"""Pipe-SGD on four emulated hosts with shaped links, one engine each. Needs root on Linux.

    sweep       what a pipeline gains over D-Sync, by r = l_comm / (l_up + l_comp)
    headline    PS-Sync, D-Sync, Pipe-SGD with each codec, and torch's DDP on a gradient of
                AlexNet's size, through links of 1 Gbit/s; bytes and coding of each codec
    learning    seconds to the accuracy of synchronous steps
    failure     what is lost without warm-up

Source: Pipe-SGD (Li et al. 2018, arXiv:1811.03619), whose headline is 5.4 times.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from workbench.bench.pipesgd import headline, learning, sweep
from workbench.bench.plot import Bar, Chart
from workbench.bench.progress import Part, Progress
from workbench.bench.report import Cell, Figure, Report
from workbench.predict.closed_form import gain_bound


@dataclass
class _Results:
    """What the parts have found so far, and what is compared."""

    what: headline.Headline
    swept: sweep.Swept | None = None
    compared: headline.Compared | None = None
    learnt: learning.Found | None = None

    def report(self) -> Report:
        """The report of all that was found so far."""
        found = [part for part in (self.swept, self.compared, self.learnt) if part is not None]
        rows: list[Mapping[str, Cell]] = [row for part in found for row in part.rows]
        figures = {name: figure for part in found for name, figure in part.figures.items()}
        return Report(
            "pipesgd",
            tuple(rows),
            figures,
            tuple(self._notes()),
            _charts(figures),
            engines=sweep.ENGINES,
        )

    def _notes(self) -> Iterator[str]:
        yield (
            f"4 hosts x 1 engine x 1 thread; links with a queue of {1e3 * sweep.QUEUE_S:g} ms. "
            "Medians and ranges of interleaved rounds, a ratio for each round; every system is "
            "built anew for its turn, and its first steps are not timed."
        )
        if self.swept is not None:
            yield (
                f"Sweep: rates chosen by {self.swept.constants!r}. pipe_vs_dsync beside the bound "
                "(1+r)/max(1,r) of the r measured in the same round; iterations beside "
                "max(l_up + l_comp, l_comm)."
            )
        if self.compared is not None:
            graph = self.compared.graph
            yield (
                f"Headline: {graph.source.name}, {graph.parameters:,} parameters, links of "
                f"{8 * self.what.rate / 1e6:g} Mbit/s, {self.what.rows} rows per rank. Coding: "
                "what encoding, decoding and adding take beyond adding alone, over the plain "
                "exchange."
            )
        if self.learnt is not None:
            yield (
                "Learning: accuracy_points is the mean difference over seeds; time_to_accuracy the "
                "ratio of seconds in steps until D-Sync's last accuracy less 0.5 points."
            )


def run(progress: Progress, *, quick: bool) -> Iterator[Report]:
    """Measures all parts; `quick` with small models, one r, one round and one seed."""
    ratios = sweep.QUICK if quick else sweep.Sweep()
    what = headline.QUICK if quick else headline.Headline()
    tasks, seeds = (learning.QUICK_TASKS, 1) if quick else (learning.TASKS, 3)
    progress.begin(
        Part("headline", what.rounds, 20 if quick else 90),
        Part("sweep", len(ratios.ratios), 30 if quick else 90),
        Part("learning", len(tasks) * seeds, 20 if quick else 60),
        Part("failure", 1, 20 if quick else 60),
    )
    found = _Results(what)
    if progress.wants("headline"):
        for found.compared in headline.run(progress, what):
            yield found.report()
    if progress.wants("sweep"):
        for found.swept in sweep.run(progress, ratios):
            yield found.report()
    if any(map(progress.wants, ("learning", "failure"))):
        for found.learnt in learning.run(progress, tasks, seeds):
            yield found.report()


def _charts(figures: Mapping[str, Figure]) -> tuple[Chart, ...]:
    ratios = [name for name in headline.RATIOS if name in figures]
    gains = [name for name in figures if name.startswith("pipe_vs_dsync_r")]
    targets = [gain_bound(float(name.removeprefix("pipe_vs_dsync_r"))) for name in gains]
    bounds = (
        Bar(f"the bound at r = {name.removeprefix('pipe_vs_dsync_r')}", bound, bound, bound)
        for name, bound in zip(gains, targets, strict=True)
    )
    pairs = [each for pair in zip(_bars(gains, figures), bounds, strict=True) for each in pair]
    return (
        Chart("Pipe-SGD, times as fast as D-Sync", tuple(pairs)),
        Chart("times as fast", tuple(_bars(ratios, figures)), target=1.0),
    )


def _bars(names: Sequence[str], figures: Mapping[str, Figure]) -> list[Bar]:
    return [
        Bar(name, figures[name].median, figures[name].min, figures[name].max, ours=True)
        for name in names
    ]
