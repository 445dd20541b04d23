"""Which engines are in use, and by what."""

import threading
from dataclasses import dataclass

from workbench.cluster.errors import ClusterError


@dataclass(frozen=True, eq=False)
class Lease:
    """Engines in use.

    Attributes:
        places: the engine of each rank.
        holder: what uses them, for people.
    """

    places: tuple[int, ...]
    holder: str


class Leases:
    """Hands out engines, each to one user at a time.

    Args:
        num_engines: how many there are.
    """

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._lock = threading.Lock()
        self._leases: list[Lease] = []

    def take(self, num_ranks: int, holder: str) -> Lease:
        """The first free engines, one for each rank.

        Raises:
            ClusterError: too few are free; the text says who has the others.
        """
        with self._lock:
            busy = self._busy()
            free = [index for index in range(self._num_engines) if index not in busy]
            if len(free) < num_ranks:
                holders = "; ".join(dict.fromkeys(busy.values()))
                raise ClusterError(
                    f"{num_ranks} engines are needed and {len(free)} of {self._num_engines} are "
                    f"free; the others are used by {holders}. Await it or stop it first"
                )
            lease = Lease(tuple(free[:num_ranks]), holder)
            self._leases.append(lease)
            return lease

    def give_back(self, lease: Lease) -> None:
        """Makes engines free again; they may be already."""
        with self._lock:
            self._leases = [other for other in self._leases if other is not lease]

    @property
    def busy(self) -> dict[int, str]:
        """For each engine in use, what uses it."""
        with self._lock:
            return self._busy()

    def _busy(self) -> dict[int, str]:
        return {place: lease.holder for lease in self._leases for place in lease.places}
