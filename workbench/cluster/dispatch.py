"""Handing work to engines: which of them are free, and where their ranks meet."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from workbench.cluster.devices import Device
from workbench.cluster.engines import Engines
from workbench.cluster.errors import ClusterError
from workbench.cluster.job import Job
from workbench.cluster.leases import Lease, Leases
from workbench.cluster.rendezvous import Rendezvous
from workbench.plan.plan import Plan


class Dispatch:
    """Gives each rank of a plan an engine of its own, and a seat among the others.

    Args:
        engines: the engines; the first `len(devices)` of them take ranks.
        devices: what each computes on.
        timeout_s: how long a rank waits for the others.

    Attributes:
        leases: which engines are in use, and by what.
    """

    def __init__(self, engines: Engines, devices: Sequence[Device], timeout_s: float) -> None:
        self.leases = Leases(len(devices))
        self._engines, self._devices = engines, devices
        self._rendezvous = Rendezvous(engines.ground.address, timeout_s)

    def require(self, plan: Plan) -> None:
        """Raises ClusterError unless these engines could run the plan."""
        if not self._engines.is_controlled:
            raise ClusterError("this cluster's controller died; cluster.restart()")
        if plan.world_size > len(self._devices):
            raise ClusterError(
                f"the plan is for {plan.world_size} ranks, but this cluster has "
                f"{len(self._devices)} engines: start Cluster({plan.world_size}), or make a "
                f"plan with world_size={len(self._devices)}"
            )

    def take(self, plan: Plan, holder: str) -> Lease:
        """Engines for a plan's ranks, until they are given back.

        Raises:
            ClusterError: the plan needs more engines than are here, or free.
        """
        self.require(plan)
        return self.leases.take(plan.world_size, holder)

    @contextmanager
    def taken(self, plan: Plan, holder: str) -> Iterator[tuple[int, ...]]:
        """Engines for a plan's ranks for as long as the body runs; those that died are replaced."""
        lease = self.take(plan, holder)
        try:
            self._engines.ensure(lease.places)
            yield lease.places
        finally:
            self.leases.give_back(lease)

    def start(
        self,
        task: str,
        packed: bytes,
        places: Sequence[int],
        shared: Mapping[str, Any],
        *,
        streams: bool = False,
    ) -> Job:
        """Starts "module:function" on engines that were taken, one rank on each.

        Args:
            task: gets `seat`, and what `shared` names.
            packed: the experiment, as a control message.
            places: the engine of each rank.
            shared: keywords that are the same for all ranks.
            streams: whether the ranks report while they work.
        """
        seats = self._rendezvous.seats([self._devices[place] for place in places])
        keywords = [{"seat": seat, **shared} for seat in seats]
        return Job(self._engines, places, task, packed, keywords, streams=streams)
