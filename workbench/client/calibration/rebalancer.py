"""Balances a run while it goes on: ranks that compute for longer get less to compute.

    every step           how long each rank computed (`compute_s` of the metrics) joins what is
                         known of the last steps
    a look               at the last few, twice, four and eight times as many: is one rank slower
                         than another by more than the threshold and than chance, and is it known
                         well enough how long each takes (`predict/balance/evidence.py`)?
    or at once           in the last few, is one slower than another by a large difference, beyond
                         what steps have scattered for longer?
    then                 the times join the devices' models (`predict/balance/online.py`), and the
                         run goes on under other shares
    after a re-cut       steps until the ranks compute with the new shares do not count; nor do
                         those with an epoch's short last batch, ever
    a rank's times that  say nothing: it is reported with its spread, and what was last known of it
    do not converge      is kept; while nothing is known, shares stay as they are

What is plain is acted upon after the fewest steps, a small difference or scattered times after
more; and since only the last steps are looked at, those from before a device changed do not hide
for long that it did. A rank's time grows with its rows, or with its share of every layer's filters.

Source: DFPA (Lastovetsky and Reddy 2009), repetition until times are known as in FuPerMod; that it
acts on a run under way is ours.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.client.run.requests import Replan
from workbench.client.run.run import Run
from workbench.plan.experiment.metrics import Row
from workbench.plan.io.errors import ExperimentError
from workbench.plan.io.html import Markup, frame_html, frame_of, save
from workbench.plan.plans.plan import Plan
from workbench.predict.balance import UNITS, Balancer, Split
from workbench.predict.balance.online import Evidence
from workbench.predict.balance.plans import TRUSTED
from workbench.store.errors import ClusterError

if TYPE_CHECKING:
    import pandas

LOOKS = (1, 2, 4, 8)  # times the patience: steps that are looked at


@dataclass(frozen=True)
class Rebalanced:
    """One change of shares.

    Attributes:
        sizes: Rows of each rank, or 64ths of the filters, from then on.
    """

    seen_at: int
    sizes: tuple[int, ...]
    replan: Replan


class Rebalancer:
    """Watches a run's metrics and changes its plan; ends with the run, or by `stop`.

    Args:
        run: the run, under way.
        split: what is shared out: the rows of a batch under the run's plan, or every layer's
            filters under `Plan.filters` over all ranks.
        threshold: the imbalance that is tolerated: (slowest - fastest) / slowest.
        patience: steps that are looked at, and up to eight times as many where their times scatter;
            two at least.
        grain: filters that are given in one piece.

    Attributes:
        changes: the changes of shares so far.
        imbalance: the imbalance in the last steps between the ranks that compute; None: not known
            yet.
        notes: notes on ranks whose times did not converge, for people; the run has them too.

    Raises:
        ClusterError: the run has ended.
        ValueError: no such split, or no patience.
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
        if patience < 2:
            raise ValueError(
                f"one step says nothing of chance: patience is 2 or more, not {patience}"
            )
        if run.is_done:
            raise ClusterError(f"{run!r} has ended")
        self.run, self.split, self.grain = run, split, grain
        self.changes: list[Rebalanced] = []
        self.imbalance: float | None = None
        self.notes: list[str] = []
        self._threshold = threshold
        sizes = self._sizes(run.experiment.plan)
        self._balancer = Balancer(sizes, threshold=threshold, patience=1)
        self._unsure: dict[int, int] = {}
        self._seen: dict[int, dict[int, float]] = {}
        self._lengths = tuple(often * patience for often in LOOKS)
        self._window: deque[Sequence[float]] = deque(maxlen=self._lengths[-1])
        self._history: deque[Sequence[float]] = deque(maxlen=self._lengths[-1])
        self._from = -1
        self._lock = threading.Lock()
        self._end: Callable[[], None] = run.subscribe(self._take)

    def stop(self) -> None:
        """Leaves the run as it is."""
        self._end()

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each change of shares: when it was seen and carried out, and its sizes."""
        rows = []
        for change in list(self.changes):
            done = change.replan.carried_out
            rows.append(
                {
                    "seen_at": change.seen_at,
                    "since_step": None if done is None else done.step,
                    "seconds": None if done is None else done.seconds,
                    "sizes": ":".join(map(str, change.sizes)),
                }
            )
        return frame_of(rows, ("seen_at", "since_step", "seconds", "sizes"))

    def save(self, path: str | Path) -> None:
        """Writes its table into a file: "x.html" or "x.csv".

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path)

    def _take(self, rows: list[Row]) -> None:
        with self._lock:
            world = self.run.experiment.plan.world_size
            for row in rows:
                step = int(row["step"])
                if _samples(row) < self.run.experiment.batch_size - 0.5:
                    continue  # the short last batch of an epoch is shared out otherwise
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
        self._history.append(seconds)
        every = tuple(self._window)
        looks = [Evidence(every[-n:]) for n in self._lengths if n <= len(every)]
        if any(self._acts(step, seen) for seen in looks):
            self._window.clear()
        elif len(looks) == len(LOOKS) and (unsure := set.intersection(*map(self._unknown, looks))):
            self._report(step, looks[-1], unsure)
            if (kept := self._with_kept(looks[-1], unsure)) and self._acts(step, kept):
                self._window.clear()
        else:
            self._unsure.clear()

    def _acts(self, step: int, seen: Evidence) -> bool:
        """Whether these times are plain enough to give other shares, or to leave them for good."""
        typical = seen.seconds
        slow = max(self._used, key=typical.__getitem__)
        fast = min(self._used, key=typical.__getitem__)
        few = len(seen.steps) == self._lengths[0]
        if not (few and seen.is_plainly_longer(slow, fast, self._history)):
            if self._unknown(seen):
                return False
            self.imbalance = 1 - typical[fast] / typical[slow]
            if not seen.is_longer(slow, fast, self._threshold):
                return False
        before, self._balancer = self._balancer, self._balancer.measured(typical)
        if self._balancer.sizes != before.sizes:
            now = self._balancer.sizes
            try:
                replan = self.run.replan(self._plan(now))
            except ExperimentError as error:  # some rank would have too few rows
                self._balancer = before
                text = f"shares stay as they are: {error}"
                if text not in self.notes:
                    self._note(text)
            else:
                self.changes.append(Rebalanced(step, now, replan))
        return True

    @property
    def _used(self) -> list[int]:
        """Ranks that have something to compute."""
        return [rank for rank, size in enumerate(self._balancer.sizes) if size]

    def _unknown(self, seen: Evidence) -> set[int]:
        """Ranks of which these times do not tell well enough how long they take."""
        return {rank for rank in self._used if self._spread(seen, rank) > TRUSTED}

    def _spread(self, seen: Evidence, rank: int) -> float:
        return seen.spread(rank, [other for other in self._used if other != rank])

    def _with_kept(self, seen: Evidence, unsure: set[int]) -> Evidence | None:
        """The same with what was last known of these ranks; None: of one nothing was."""
        known = {rank: self._balancer.expected(rank) for rank in unsure}
        if None in known.values():
            return None
        return Evidence([[known.get(r) or s for r, s in enumerate(own)] for own in seen.steps])

    def _report(self, step: int, seen: Evidence, unsure: set[int]) -> None:
        """Says of ranks whose times have not converged for long, once until they do.

        A device that has just changed is not yet one of them: the steps from before are among the
        last ones for a while.
        """
        self._unsure = {rank: self._unsure.get(rank, 0) + 1 for rank in unsure}
        for rank in (rank for rank, n in self._unsure.items() if n == self._lengths[-2]):
            known = self._balancer.expected(rank) is not None
            self._note(
                f"until step {step} the times of rank {rank} did not converge: "
                f"{seen.seconds[rank]:.3g} s +- {self._spread(seen, rank):.0%} in "
                f"{len(seen.steps)} steps, {TRUSTED:.0%} is believed; "
                + ("its last model is kept" if known else "nothing changes")
            )

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

    def _repr_html_(self) -> Markup:
        return frame_html(repr(self)[1:-1], self.to_frame(), "changes")

    def __repr__(self) -> str:
        now = "not measured yet" if self.imbalance is None else f"{self.imbalance:.1%}"
        sizes = ":".join(map(str, self._balancer.sizes))
        return f"<Rebalancer: {self.split} {sizes}, imbalance {now}, {len(self.changes)} changes>"


def _samples(row: Row) -> float:
    """Of the step's batch."""
    seconds = row["compute_s"] + row["communication_s"] + row["wait_s"]
    return row["samples_per_s"] * seconds
