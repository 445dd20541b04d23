"""From what ranks measured of their collectives to links."""

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from workbench.plan.fitting import costs
from workbench.plan.link import Curve, Link
from workbench.train.measure_links import LinksMeasured, Timed

_SLOWEST = 1e-15  # seconds for each byte, where none could be seen


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


def _link(
    name: str, found: Sequence[LinksMeasured], hosts: Sequence[str], *, spans: bool
) -> Link | None:
    def chosen(ranks: tuple[int, ...]) -> bool:
        return (len({hosts[rank] for rank in ranks}) > 1) == spans

    timed = [t for rank in found for t in rank.collectives if chosen(t.ranks)]
    if not timed:
        return None
    terms = np.array([(t.rounds, t.received, t.added) for t in timed], dtype=float)
    latency, per_byte, added = costs(terms, np.array([t.seconds for t in timed])).tolist()
    busy = [share for rank in found for ranks, share in rank.busy.items() if chosen(ranks)]
    return Link(
        name=name,
        latency_s=latency,
        bandwidth=1 / max(per_byte, _SLOWEST),
        reduction_s_per_byte=added,
        busy=fmean(busy),
        curves=_curves(timed),
        source="measured, all groups of a size at once",
    )


def _curves(timed: Sequence[Timed]) -> tuple[Curve, ...]:
    """For each collective and number of ranks, the mean over ranks at each size."""
    found: dict[tuple[str, int], dict[int, list[float]]] = {}
    for each in timed:
        points = found.setdefault((each.op, len(each.ranks)), {})
        points.setdefault(each.received, []).append(each.seconds)
    return tuple(
        Curve(
            op=op,
            ranks=ranks,
            points=tuple((received, fmean(points[received])) for received in sorted(points)),
        )
        for (op, ranks), points in found.items()
    )
