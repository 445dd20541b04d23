"""Ranks whose memory grows from step to step, told before it runs out."""

from dataclasses import dataclass, field

from workbench.plan.metrics import Row

# What libraries and caches take in the first steps is no trend.
SETTLED_STEPS = 50
GROWN, AT_LEAST_BYTES = 1.5, 256 << 20
_GIB = 2**30


@dataclass
class _Rank:
    step: int
    rss_bytes: float


@dataclass
class MemoryTrend:
    """Follows the resident memory of a job's ranks, from the rows that they report."""

    _since: dict[int, _Rank] = field(default_factory=dict)

    def look(self, rows: dict[int, Row], resumed: int) -> list[str]:
        """Takes the newest row of each rank; gives what people should know, in words.

        A rank is told of each time its memory is half as much more as it was then.

        Args:
            rows: by rank.
            resumed: the step that its processes began at.
        """
        told = []
        for number, row in sorted(rows.items()):
            step, rss_bytes = int(row["step"]), row["rss_bytes"]
            if step < resumed + SETTLED_STEPS:
                continue
            since = self._since.setdefault(number, _Rank(step, rss_bytes))
            if rss_bytes >= max(GROWN * since.rss_bytes, since.rss_bytes + AT_LEAST_BYTES):
                told.append(
                    f"the memory of rank {number} has grown from {since.rss_bytes / _GIB:.1f} to "
                    f"{rss_bytes / _GIB:.1f} GiB since step {since.step}"
                )
                self._since[number] = _Rank(step, rss_bytes)
        return told
