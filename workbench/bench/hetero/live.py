"""A device slows down during a run: the shares that follow, and the speed with them.

Three runs, one after the other, on devices of which the last one is slowed three times:

    followed   a run that is balanced as it runs; the device slows down in its middle
    best       the best static shares for the new speeds, from a calibration under them
    left       equal shares, as they were

    recovered_after_slowdown   samples per second of the first, over those of the second
    gain_of_rebalancing        the same over the third
    rebalancing_rounds         changes of shares after the slowdown
    imbalance                  (slowest - fastest) / slowest of the ranks' computing, under the last
                               shares
    imbalance_of_one_row       what one row more or less makes on the rank that has the fewest:
                               below that, no shares are sure to come
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.bench.hetero.static import Case, Found
from workbench.bench.report import Figure
from workbench.client.calibration.rebalancer import Rebalancer
from workbench.client.cluster import Cluster
from workbench.client.run.run import Run

FACTOR = 3.0
RECOVER_WITHIN = 20  # steps
LAST = 8  # of those steps, that count
SETTLE = 72  # more, after which shares are looked at: small differences take most evidence
TYPICAL = 24  # of those, that count
TICK_S = 0.02


@dataclass(frozen=True)
class Round:
    """One slowdown.

    Attributes:
        speeds: the samples per second after it, by the name of the run.
        imbalance: the imbalance under the last shares.
        one_row: the imbalance that one row makes.
        changes: the number of changes of shares after the slowdown.
        seconds: the seconds of each change of shares.
        notes: the notes of the balancer.
    """

    speeds: Mapping[str, float]
    imbalance: float
    one_row: float
    changes: int
    seconds: Sequence[float]
    notes: Sequence[str]


def found_in(found: Sequence[Round], world: int) -> Found:
    """The rows and figures of some slowdowns, of the last of so many engines."""
    recovered = [one.speeds["followed"] for one in found]
    taken = [s for one in found for s in one.seconds]
    return Found(
        tuple(
            {"shares": name, "samples/s after the slowdown": speed}
            for one in found
            for name, speed in one.speeds.items()
        ),
        {
            "recovered_after_slowdown": _over(recovered, found, "best"),
            "gain_of_rebalancing": _over(recovered, found, "left"),
            "rebalancing_rounds": Figure.of([one.changes for one in found]),
            "imbalance": Figure.of([one.imbalance for one in found]),
            "imbalance_of_one_row": Figure.of([one.one_row for one in found]),
        },
        (
            f"Engine {world - 1} becomes {FACTOR:g} times slower; samples/s are of the "
            f"median of {LAST} steps, the last ones of the {RECOVER_WITHIN} after it; imbalance of "
            f"the ranks' own medians of {TYPICAL}, under the last shares, {SETTLE} steps later. "
            f"Changes of shares took, in s: {', '.join(f'{s:.3g}' for s in taken) or 'none'}.",
            *(note for one in found for note in one.notes),
        ),
    )


def _over(recovered: Sequence[float], found: Sequence[Round], name: str) -> Figure:
    return Figure.of([mine / one.speeds[name] for mine, one in zip(recovered, found, strict=True)])


def slowdown(cluster: Cluster, case: Case, *, quick: bool) -> Round:
    """Measures the three runs."""
    world, slow = len(cluster), len(cluster) - 1
    experiment = case.experiment(case.equal(world), 1_000_000)
    try:
        followed = cluster.train(experiment, module=case.module)
        balancer = Rebalancer(followed)
        _until(followed, 6 if quick else 12)
        cluster.slow(slow, FACTOR)
        slowed_at, earlier = _last_step(followed), len(balancer.changes)
        _until(followed, slowed_at + RECOVER_WITHIN)
        speeds = {"followed": _speed(followed, slowed_at + RECOVER_WITHIN)}
        _until(followed, slowed_at + RECOVER_WITHIN + (LAST if quick else SETTLE))
        imbalance, one_row = _imbalance(followed, balancer), _one_row(followed)
        _end(followed)
        best = case.chosen(cluster, world, 2.0 if quick else 10.0).plan
        for name, chosen in (("best", best), ("left", experiment.plan)):
            static = cluster.train(experiment.replace(plan=chosen), module=case.module)
            _until(static, LAST + 2 if quick else RECOVER_WITHIN)
            speeds[name] = _speed(static, _last_step(static))
            _end(static)
    finally:
        cluster.mend()
    changes = [change.replan.carried_out for change in balancer.changes]
    return Round(
        speeds,
        imbalance,
        one_row,
        len(changes) - earlier,
        [done.seconds for done in changes if done is not None],
        balancer.notes,
    )


def _imbalance(run: Run, balancer: Rebalancer) -> float:
    """(slowest - fastest) / slowest, of the median compute time of ranks that have rows."""
    done = [change.replan.carried_out for change in balancer.changes]
    since = max((one.step for one in done if one is not None), default=0)
    rows = run.experiment.plan.rows_of(run.experiment.batch_size)
    seen: dict[int, list[float]] = {rank: [] for rank, count in enumerate(rows) if count}
    for row in run.rows[:]:
        if row["step"] > since and row["rank"] in seen:  # the first one gets its memory
            seen[int(row["rank"])].append(row["compute_s"])
    typical = [statistics.median(own[-TYPICAL:]) for own in seen.values() if own]
    return (max(typical) - min(typical)) / max(typical) if typical else 0.0


def _one_row(run: Run) -> float:
    """The imbalance of one row, on the rank with the fewest rows above none."""
    rows = run.experiment.plan.rows_of(run.experiment.batch_size)
    return 1 / min(count for count in rows if count)


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
