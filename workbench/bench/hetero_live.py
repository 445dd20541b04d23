"""A device slows down while a run goes on: shares follow, and how fast it is then.

Three runs, one after the other, on devices of which the last one is slowed three times:

    followed   a run that is balanced while it goes on; the device slows down in its middle
    best       the best static shares for the new speeds, from a calibration under them
    left       equal shares, as they were
"""

import statistics
import time
from dataclasses import dataclass

from torch import nn

from workbench.bench.report import Cell, Figure
from workbench.cluster.cluster import Cluster
from workbench.cluster.rebalancer import Rebalancer
from workbench.cluster.run import Run
from workbench.plan.experiment import SGD, Experiment, Synthetic
from workbench.plan.graph import Graph
from workbench.plan.plan import Plan
from workbench.predict.balance import balanced

FACTOR = 3.0
RECOVER_WITHIN = 20  # steps
LAST = 8  # of those steps, that count
TICK_S = 0.02


@dataclass(frozen=True)
class Live:
    """Lines, figures and notes of this part."""

    rows: tuple[dict[str, Cell], ...]
    figures: dict[str, Figure]
    notes: tuple[str, ...]


def run(cluster: Cluster, graph: Graph, module: nn.Module, batch_size: int, *, quick: bool) -> Live:
    """Measures the three runs."""
    world, slow = len(cluster), len(cluster) - 1
    before = 6 if quick else 20
    plan = Plan.data_parallel(graph, world)
    experiment = Experiment(
        plan=plan,
        data=Synthetic(samples=256),
        batch_size=batch_size,
        optimizer=SGD(lr=0.01, momentum=0.9),
        steps=1_000_000,
    )
    try:
        followed = cluster.train(experiment, module=module)
        balancer = Rebalancer(followed)
        _until(followed, before)
        cluster.slow(slow, FACTOR)
        slowed_at = _last_step(followed)
        _until(followed, slowed_at + RECOVER_WITHIN)
        recovered = _speed(followed, slowed_at + RECOVER_WITHIN)
        _end(followed)
        machine = cluster.calibrate(
            plan,
            rows=tuple(max(1, batch_size // part) for part in (12, 6, 3, 2)),
            within_s=5.0 if quick else 40.0,
            fresh=True,
            module=module,
        )
        best = balanced(experiment, machine).plan
        speeds = {}
        for name, chosen in (("best", best), ("left", plan)):
            static = cluster.train(experiment.replace(plan=chosen), module=module)
            _until(static, RECOVER_WITHIN if not quick else LAST + 2)
            speeds[name] = _speed(static, _last_step(static))
            _end(static)
    finally:
        cluster.mend()
    changes = [change.replan.carried_out for change in balancer.changes]
    rows = tuple[dict[str, Cell], ...](
        {"shares": name, "samples/s after the slowdown": speed}
        for name, speed in (("followed", recovered), *speeds.items())
    )
    ratio, gain = recovered / speeds["best"], recovered / speeds["left"]
    seconds = [done.seconds for done in changes if done is not None]
    return Live(
        rows,
        {
            "recovered_after_slowdown": Figure(ratio, ratio, ratio),
            "gain_of_rebalancing": Figure(gain, gain, gain),
            "rebalancing_rounds": Figure(len(changes), len(changes), len(changes)),
        },
        (
            f"Engine {slow} becomes {FACTOR:g} times slower; samples/s are medians of {LAST} "
            f"steps, the last ones of the {RECOVER_WITHIN} after it. Changes of shares took, in "
            f"seconds: {', '.join(f'{s:.3g}' for s in seconds) or 'none'}.",
        ),
    )


def _until(run: Run, step: int) -> None:
    while _last_step(run) < step and not run.is_done:
        time.sleep(TICK_S)


def _last_step(run: Run) -> int:
    return max((int(row["step"]) for row in run.rows[-16:]), default=0)


def _speed(run: Run, step: int) -> float:
    """Samples per second in the steps before this one."""
    rows = [row for row in run.rows[:] if row["rank"] == 0 and row["step"] <= step]
    return statistics.median(row["samples_per_s"] for row in rows[-LAST:])


def _end(run: Run) -> None:
    run.stop()
    run.wait()
