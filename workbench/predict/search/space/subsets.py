"""All sets of some things, in the order of what they cost together."""

from collections.abc import Iterator, Mapping
from heapq import heappop, heappush


def cheapest_sums(costs: Mapping[str, float]) -> Iterator[tuple[tuple[str, ...], float]]:
    """(things, sum of their costs) of every set but the empty one, the cheapest first.

    Args:
        costs: of each thing, not negative.
    """
    names = sorted(costs, key=lambda name: costs[name])
    if not names:
        return
    waiting: list[tuple[float, tuple[int, ...]]] = [(costs[names[0]], (0,))]
    while waiting:
        total, chosen = heappop(waiting)
        yield tuple(names[index] for index in chosen), total
        *rest, last = chosen
        if last + 1 < len(names):
            more = costs[names[last + 1]]
            heappush(waiting, (total + more, (*chosen, last + 1)))
            heappush(waiting, (total - costs[names[last]] + more, (*rest, last + 1)))
