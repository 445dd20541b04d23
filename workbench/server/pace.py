"""How fast the ranks of a job go, which of them is slower than others, or ever larger."""

from bisect import bisect_left
from dataclasses import dataclass, field

from workbench.plan.experiment.metrics import Row

# A rank is a straggler that computes so many times longer than the others do, so often in a row.
SLOWER, AGAIN = 1.5, 1.2
LOOKS = 5
_KEEP = 0.7  # of what was known, beside each new look


@dataclass
class _Rank:
    step: int = -1
    time: float = 0.0
    compute_s: float = 0.0
    wait_share: float = 0.0
    slow_looks: int = 0
    slow_since: int = 0
    is_told: bool = False


@dataclass
class Pace:
    """Follows the newest rows of a job's ranks.

    Args:
        predicted_s: seconds that a step was predicted to take; None: nothing was predicted.
    """

    predicted_s: float | None = None
    step_s: float = 0.0
    longest_gap_s: float = 0.0
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _slow_looks: int = 0
    _slow_since: int = 0
    _is_told: bool = False

    def poll(self, rows: dict[int, Row]) -> list[str]:
        """Takes the newest row of each rank; gives what people should know, in words."""
        moved = [number for number, row in rows.items() if self._take(number, row)]
        if not moved:
            return []
        return [*self._stragglers(), *self._against_prediction()]

    @property
    def step(self) -> int:
        """Updates that are done on all ranks."""
        return min((rank.step for rank in self._ranks.values()), default=-1) + 1

    @property
    def wait_share(self) -> dict[int, float]:
        """By rank: the part of its last step that it waited for slower ones."""
        return {number: rank.wait_share for number, rank in self._ranks.items()}

    def _take(self, number: int, row: Row) -> bool:
        rank, step = self._ranks.setdefault(number, _Rank()), int(row["step"])
        if step == rank.step:
            return False
        if rank.step >= 0 and step > rank.step:
            took = (row["time"] - rank.time) / (step - rank.step)
            self.longest_gap_s = max(self.longest_gap_s, took)
            self.step_s = took if not self.step_s else _KEEP * self.step_s + (1 - _KEEP) * took
        known = rank.compute_s or row["compute_s"]
        rank.compute_s = _KEEP * known + (1 - _KEEP) * row["compute_s"]
        whole = row["compute_s"] + row["communication_s"] + row["wait_s"]
        rank.wait_share = row["wait_s"] / whole if whole > 0 else 0.0
        rank.step, rank.time = step, row["time"]
        return True

    def _stragglers(self) -> list[str]:
        told: list[str] = []
        if len(self._ranks) < 2:
            return told
        ordered = sorted(rank.compute_s for rank in self._ranks.values())
        for number, rank in sorted(self._ranks.items()):
            usual = _median_without(ordered, rank.compute_s)
            if usual <= 0:
                continue
            factor = rank.compute_s / usual
            if factor >= SLOWER:
                rank.slow_since = rank.slow_since if rank.slow_looks else rank.step
                rank.slow_looks += 1
                if rank.slow_looks >= LOOKS and not rank.is_told:
                    rank.is_told = True
                    since = f"since step {rank.slow_since}"
                    told.append(
                        f"rank {number} is {factor:.1f} times slower than the others {since}"
                    )
            elif factor < AGAIN:
                if rank.is_told:
                    told.append(f"rank {number} is as fast as the others again at step {rank.step}")
                rank.slow_looks, rank.is_told = 0, False
        return told

    def _against_prediction(self) -> list[str]:
        if not self.predicted_s or not self.step_s:
            return []
        factor = self.step_s / self.predicted_s
        if factor < SLOWER:
            self._slow_looks = 0
            return []
        self._slow_since = self._slow_since if self._slow_looks else self.step
        self._slow_looks += 1
        if self._slow_looks < LOOKS or self._is_told:
            return []
        self._is_told = True
        return [
            f"a step takes {self.step_s:.3g} s, {factor:.1f} times as long as predicted, "
            f"since step {self._slow_since}"
        ]


def _median_without(ordered: list[float], one: float) -> float:
    """The median of a sorted list but for one of its values."""
    place, count = bisect_left(ordered, one), len(ordered) - 1
    low, high = (middle + (middle >= place) for middle in ((count - 1) // 2, count // 2))
    return (ordered[low] + ordered[high]) / 2


# What libraries and caches take in the first steps is no trend.
SETTLED_STEPS = 50
GROWN, AT_LEAST_BYTES = 1.5, 256 << 20
_GIB = 2**30


@dataclass
class _Growing:
    step: int
    rss_bytes: float


@dataclass
class MemoryTrend:
    """Follows the resident memory of a job's ranks, from the rows that they report."""

    _since: dict[int, _Growing] = field(default_factory=dict)

    def poll(self, rows: dict[int, Row], resumed: int) -> list[str]:
        """Takes the newest row of each rank; gives what people should know, in words.

        A rank is told of each time its memory is half as much more as it was then.
        """
        told = []
        for number, row in sorted(rows.items()):
            step, rss_bytes = int(row["step"]), row["rss_bytes"]
            if step < resumed + SETTLED_STEPS:
                continue
            since = self._since.setdefault(number, _Growing(step, rss_bytes))
            if rss_bytes >= max(GROWN * since.rss_bytes, since.rss_bytes + AT_LEAST_BYTES):
                told.append(
                    f"the memory of rank {number} has grown from {since.rss_bytes / _GIB:.1f} to "
                    f"{rss_bytes / _GIB:.1f} GiB since step {since.step}"
                )
                self._since[number] = _Growing(step, rss_bytes)
        return told
