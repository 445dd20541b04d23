"""Balances a run while it goes on: ranks that compute for longer get less to compute.

    every step           how long each rank computed (`compute_s` of the metrics) joins what is
                         known of the devices (`predict/balance/online.py`)
    for some in a row    imbalance above the threshold, by more than chance (Student's t): the run
                         goes on under other shares; where it may be chance, some more steps tell
    after a re-cut       steps until the ranks compute with the new shares do not count
    a rank's times that  say nothing: it is reported with its spread, and what was last known of it
    do not converge      is kept; while nothing is known, shares stay as they are

A rank's time grows with its rows, or with its share of every layer's filters.

Source: DFPA (Lastovetsky and Reddy 2009); that it acts on a run under way is ours.
"""

import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from workbench.cluster.errors import ClusterError
from workbench.cluster.replan import Replan
from workbench.cluster.run import Run
from workbench.plan.metrics import Row
from workbench.plan.plan import Plan
from workbench.predict.balance import UNITS, Balancer, Split

CONFIDENCE = 0.99  # of each look; there are some
LONGEST = 4  # times the patience: what is not sure by then is chance
STEADY = 0.2
"""Of a rank's median time in a window: the median deviation from it up to which it is believed."""


@dataclass(frozen=True)
class Rebalanced:
    """One change of shares.

    Attributes:
        seen_at: the step whose times brought it about.
        sizes: rows of each rank, or 64ths of the filters, from then on.
        replan: what became of it.
    """

    seen_at: int
    sizes: tuple[int, ...]
    replan: Replan


class Rebalancer:
    """Watches a run's metrics and changes its plan; ends with the run, or by `stop`.

    Args:
        run: under way.
        split: what is shared out: the rows of a batch under the run's plan, or every layer's
            filters under `Plan.filters` over all ranks.
        threshold: imbalance that is borne: (slowest - fastest) / slowest.
        patience: steps in a row that must exceed it, up to four times as many where their times
            scatter; the median counts.
        grain: of filters.

    Attributes:
        changes: of shares so far.
        imbalance: of the last steps; None: not known yet.
        notes: on ranks whose times did not converge, for people; the run has them too.

    Raises:
        ClusterError: the run has ended.
    """

    def __init__(
        self,
        run: Run,
        *,
        split: Split = "rows",
        threshold: float = 0.05,
        patience: int = 3,
        grain: int = 8,
    ) -> None:
        if split not in ("rows", "filters"):
            raise ValueError(f"there is no split {split!r}; 'rows' and 'filters' are valid")
        if run.is_done:
            raise ClusterError(f"{run!r} has ended")
        self.run, self.split, self.grain = run, split, grain
        self.changes: list[Rebalanced] = []
        self.imbalance: float | None = None
        self.notes: list[str] = []
        self._patience, self._threshold = patience, threshold
        sizes = self._sizes(run.experiment.plan)
        self._balancer = Balancer(sizes, threshold=threshold, patience=1)
        self._unsteady: set[int] = set()
        self._seen: dict[int, dict[int, float]] = {}
        self._window: list[tuple[float, ...]] = []
        self._from = -1
        self._lock = threading.Lock()
        self._end: Callable[[], None] = run.subscribe(self._take)

    def stop(self) -> None:
        """Leaves the run as it is."""
        self._end()

    def _take(self, rows: list[Row]) -> None:
        with self._lock:
            world = self.run.experiment.plan.world_size
            for row in rows:
                step = int(row["step"])
                times = self._seen.setdefault(step, {})
                times[int(row["rank"])] = row["compute_s"]
                if len(times) == world:
                    del self._seen[step]
                    self._step(step, tuple(times[rank] for rank in range(world)))

    def _step(self, step: int, seconds: tuple[float, ...]) -> None:
        if self.changes:
            done = self.changes[-1].replan.carried_out
            if done is None:
                return
            self._from = done.step
        if step <= self._from:  # the first step under other shares gets its memory
            return
        self._window.append(seconds)
        if len(self._window) < self._patience:
            return
        times = self._believed(step)
        if times is None:
            self._window.clear()
            return
        typical = tuple(map(statistics.median, times))
        used = [rank for rank, size in enumerate(self._balancer.sizes) if size]
        slow, fast = max(used, key=typical.__getitem__), min(used, key=typical.__getitem__)
        self.imbalance = 1 - typical[fast] / typical[slow]
        if self.imbalance > self._threshold:
            if not _is_sure(times[slow], times[fast], self._threshold):
                if len(self._window) >= LONGEST * self._patience:
                    self._window.clear()
                return
            self._balance(step, typical)
        self._window.clear()

    def _balance(self, step: int, typical: tuple[float, ...]) -> None:
        before, self._balancer = self._balancer, self._balancer.measured(typical)
        sizes = self._balancer.sizes
        if sizes != before.sizes:
            self.changes.append(Rebalanced(step, sizes, self.run.replan(self._plan(sizes))))

    def _believed(self, step: int) -> list[tuple[float, ...]] | None:
        """Seconds of each rank in the window; None: of one of them nothing is known."""
        found = list[tuple[float, ...]]()
        for rank, times in enumerate(zip(*self._window, strict=True)):
            middle = statistics.median(times)
            spread = statistics.median(abs(seconds - middle) for seconds in times)
            if spread <= STEADY * middle:
                self._unsteady.discard(rank)
                found.append(times)
                continue
            known = self._balancer.expected(rank)
            if rank not in self._unsteady:
                self._unsteady.add(rank)
                self._note(
                    f"until step {step} the times of rank {rank} did not converge: "
                    f"{min(times):.3g} .. {max(times):.3g} s in {len(times)} steps; "
                    + ("nothing changes" if known is None else "its last model is kept")
                )
            if known is not None:
                found.append((known,) * len(times))
        return found if len(found) == len(self._balancer.sizes) else None

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.run.notes.append(text)

    def _sizes(self, plan: Plan) -> tuple[int, ...]:
        """The shares that the run has now, in rows or in 64ths."""
        if self.split == "rows":
            return plan.rows_of(self.run.experiment.batch_size)
        return Plan.data_parallel(plan.graph, plan.world_size, plan.row_shares).rows_of(UNITS)

    def _plan(self, sizes: tuple[int, ...]) -> Plan:
        plan = self.run.experiment.plan
        if self.split == "rows":
            return plan.with_rows(sizes)
        shared = Plan.filters(plan.graph, plan.world_size, sizes, grain=self.grain)
        return shared.with_batch_norm(plan.batch_norm)

    def __repr__(self) -> str:
        now = "not measured yet" if self.imbalance is None else f"{self.imbalance:.1%}"
        sizes = ":".join(map(str, self._balancer.sizes))
        return f"<Rebalancer: {self.split} {sizes}, imbalance {now}, {len(self.changes)} changes>"


def _is_sure(slow: Sequence[float], fast: Sequence[float], threshold: float) -> bool:
    """Whether one rank takes longer than another by more than the threshold, and not by chance.

    Args:
        slow: its seconds, step by step.
        fast: of the other one, in the same steps.
        threshold: relative to the slow one.
    """
    beyond = [(1 - threshold) * one - other for one, other in zip(slow, fast, strict=True)]
    if len(beyond) < 2:
        return True
    error = statistics.stdev(beyond) / len(beyond) ** 0.5
    return statistics.fmean(beyond) > float(stdtrit(len(beyond) - 1, CONFIDENCE)) * error
