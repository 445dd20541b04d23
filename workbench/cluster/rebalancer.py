"""Balances a run while it goes on: ranks that compute for longer get less to compute.

    every step           how long each rank computed (`compute_s` of the metrics) joins what is
                         known of the devices (`predict/balance/online.py`)
    for some in a row    imbalance above the threshold: the run goes on under other shares
    after a re-cut       steps until the ranks compute with the new shares do not count
    a rank's times that  say nothing: it is reported with its spread, and what was last known of it
    do not converge      is kept; while nothing is known, shares stay as they are

A rank's time grows with its rows, or with its share of every layer's filters.

Source: DFPA (Lastovetsky and Reddy 2009); that it acts on a run under way is ours.
"""

import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass

from workbench.cluster.errors import ClusterError
from workbench.cluster.replan import Replan
from workbench.cluster.run import Run
from workbench.plan.metrics import Row
from workbench.plan.plan import Plan
from workbench.predict.balance import UNITS, Balancer, Split

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
        patience: steps in a row that must exceed it; their median counts.
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
        self._patience = patience
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
        before = self._balancer
        typical = self._typical(step)
        self._window.clear()
        if typical is None:
            return
        self._balancer = before.measured(typical)
        used = [s for s, size in zip(typical, before.sizes, strict=True) if size]
        self.imbalance = (max(used) - min(used)) / max(used)
        if self._balancer.sizes != before.sizes:
            sizes = self._balancer.sizes
            replan = self.run.replan(self._plan(sizes))
            self.changes.append(Rebalanced(step, sizes, replan))

    def _typical(self, step: int) -> tuple[float, ...] | None:
        """Seconds of each rank in the window; None: of one of them nothing is known."""
        found = list[float | None]()
        for rank, times in enumerate(zip(*self._window, strict=True)):
            middle = statistics.median(times)
            spread = statistics.median(abs(seconds - middle) for seconds in times)
            is_steady = spread <= STEADY * middle
            found.append(middle if is_steady else self._balancer.expected(rank))
            if is_steady:
                self._unsteady.discard(rank)
            elif rank not in self._unsteady:
                self._unsteady.add(rank)
                self._note(
                    f"until step {step} the times of rank {rank} did not converge: "
                    f"{min(times):.3g} .. {max(times):.3g} s in {len(times)} steps; "
                    + ("nothing changes" if found[-1] is None else "its last model is kept")
                )
        known = tuple(seconds for seconds in found if seconds is not None)
        return known if len(known) == len(found) else None

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
