"""Pipe-SGD on four emulated hosts with shaped links, one engine each. Needs root on Linux.

    sweep       what a pipeline gains over D-Sync, by r = l_comm / (l_up + l_comp)
    headline    PS-Sync, D-Sync, Pipe-SGD with each codec, and torch's DDP on a gradient of
                AlexNet's size, through links of 1 Gbit/s; bytes and coding of each codec
    learning    seconds to the accuracy of synchronous steps, and the failure without warm-up

Source: Pipe-SGD (Li et al. 2018, arXiv:1811.03619), whose headline is 5.4 times.
"""

from collections.abc import Mapping, Sequence

from workbench.bench.pipesgd import headline, learning, sweep
from workbench.bench.plot import Bar, Chart
from workbench.bench.report import Figure, Report
from workbench.predict.closed_form import gain_bound


def run(*, quick: bool) -> Report:
    """Measures all three parts; `quick` with small models, one r, one round and one seed."""
    swept = sweep.run(sweep.QUICK if quick else sweep.Sweep())
    what = headline.QUICK if quick else headline.Headline()
    compared = headline.run(what)
    tasks, seeds = (learning.QUICK_TASKS, 1) if quick else (learning.TASKS, 3)
    learnt, learning_figures = learning.run(tasks, seeds)
    figures = swept.figures | compared.figures | learning_figures
    return Report(
        "pipesgd",
        (*swept.rows, *compared.rows, *learnt),
        figures,
        (
            f"4 hosts x 1 engine x 1 thread; links with a queue of {1e3 * sweep.QUEUE_S:g} ms. "
            "Medians and ranges of interleaved rounds, a ratio for each round; every system is "
            "built anew for its turn, and its first steps are not timed.",
            f"Sweep: rates chosen by {swept.constants!r}. pipe_vs_dsync beside the bound "
            "(1+r)/max(1,r) of the r measured in the same round; iterations beside "
            "max(l_up + l_comp, l_comm).",
            f"Headline: {compared.graph.source.name}, {compared.graph.parameters:,} parameters, "
            f"links of {8 * what.rate / 1e6:g} Mbit/s, {what.rows} rows per rank. Coding: what "
            "encoding, decoding and adding take beyond adding alone, over the plain exchange.",
            "Learning: accuracy_points is the mean difference over seeds; time_to_accuracy the "
            "ratio of seconds in steps until D-Sync's last accuracy less 0.5 points.",
        ),
        _charts(figures),
    )


def _charts(figures: Mapping[str, Figure]) -> tuple[Chart, ...]:
    gains = [name for name in figures if name.startswith("pipe_vs_dsync_r")]
    targets = [gain_bound(float(name.removeprefix("pipe_vs_dsync_r"))) for name in gains]
    bounds = (
        Bar(f"the bound at r = {name.removeprefix('pipe_vs_dsync_r')}", bound, bound, bound)
        for name, bound in zip(gains, targets, strict=True)
    )
    pairs = [each for pair in zip(_bars(gains, figures), bounds, strict=True) for each in pair]
    return (
        Chart("Pipe-SGD, times as fast as D-Sync", tuple(pairs)),
        Chart("times as fast", tuple(_bars(headline.RATIOS, figures)), target=1.0),
    )


def _bars(names: Sequence[str] | Mapping[str, object], figures: Mapping[str, Figure]) -> list[Bar]:
    return [
        Bar(name, figures[name].median, figures[name].min, figures[name].max, ours=True)
        for name in names
    ]
