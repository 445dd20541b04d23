"""From what ranks measured of their collectives to links."""

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean

import numpy as np

from workbench.plan.fitting import costs
from workbench.plan.link import Curve, Link
from workbench.train.measure.links import LinksMeasured, Timed

_SLOWEST = 1e-15  # seconds for each byte, where none could be seen
# What ranks usually communicate by; getting new memory is no matter of the link.
_OF_THE_LINK = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def links_of(found: Sequence[LinksMeasured], hosts: Sequence[str]) -> tuple[Link, Link | None]:
    """(within a host, across hosts) from what each rank found; None: there is one host.

    Args:
        found: of each rank.
        hosts: the name of each rank's host.
    """
    whole = Link(name="one rank", latency_s=0.0, bandwidth=1 / _SLOWEST)
    inside = _link("within a host", found, hosts, spans=False)
    if len(set(hosts)) == 1:
        return inside or whole, None
    across = _link("across hosts", found, hosts, spans=True)
    assert across is not None
    return inside or whole, across


def slowdown_of(found: Sequence[LinksMeasured]) -> float:
    """How much slower ranks compute beside a collective: the mean over ranks and groups."""
    every = [cost.slowdown for rank in found for cost in rank.beside.values()]
    return fmean(every) if every else 1.0


def _link(
    name: str, found: Sequence[LinksMeasured], hosts: Sequence[str], *, spans: bool
) -> Link | None:
    def chosen(ranks: tuple[int, ...]) -> bool:
        return (len({hosts[rank] for rank in ranks}) > 1) == spans

    timed = [t for rank in found for t in rank.collectives if chosen(t.ranks)]
    if not timed:
        return None
    plain = [t for t in timed if t.op in _OF_THE_LINK]
    terms = np.array([(t.rounds, t.received, t.added) for t in plain], dtype=float)
    latency, per_byte, added = costs(terms, np.array([t.seconds for t in plain])).tolist()
    busy = [cost.busy for rank in found for ranks, cost in rank.beside.items() if chosen(ranks)]
    return Link(
        name=name,
        latency_s=latency,
        bandwidth=1 / max(per_byte, _SLOWEST),
        reduction_s_per_byte=added,
        busy=fmean(busy),
        curves=_curves(found, chosen),
        source="measured, all groups of a size at once",
    )


def _curves(
    found: Sequence[LinksMeasured], chosen: Callable[[tuple[int, ...]], bool]
) -> tuple[Curve, ...]:
    """For each collective and number of ranks, the mean over ranks at each size.

    Where a tensor cannot be cut equally, ranks receive different numbers of bytes at one size.
    """
    sizes: dict[tuple[str, int], dict[int, list[Timed]]] = {}
    for rank in found:
        seen: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for timed in rank.collectives:
            if chosen(timed.ranks):
                at = sizes.setdefault((timed.op, len(timed.ranks)), {})
                at.setdefault(seen[timed.op, timed.ranks], []).append(timed)
                seen[timed.op, timed.ranks] += 1
    return tuple(
        Curve(op=op, ranks=ranks, points=tuple(sorted(dict(map(_point, at.values())).items())))
        for (op, ranks), at in sizes.items()
    )


def _point(timed: Sequence[Timed]) -> tuple[float, float]:
    return fmean(each.received for each in timed), fmean(each.seconds for each in timed)
