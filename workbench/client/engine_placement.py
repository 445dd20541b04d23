"""Where a cluster's engines run: on this host, on emulated ones, or wherever a launcher says."""

from collections.abc import Callable
from dataclasses import dataclass

from workbench.hosts.devices import assign, whole_host
from workbench.hosts.emulated.hosts import Hosts
from workbench.hosts.host import probe
from workbench.store.cluster_spec import HERE, Site, Spec
from workbench.store.device import Device
from workbench.store.owner import Owner
from workbench.store.profile import Launch

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class EnginePlacement:
    """Where engines run.

    Attributes:
        devices: what each engine computes on; the last one has all of this host, for what is
            done once, for all ranks.
        sites: where each engine runs.
        address: of this process, at which all engines can reach it.
        leave: ends what was made for these engines only.
    """

    devices: tuple[Device, ...]
    sites: tuple[Site, ...]
    address: str
    leave: Callable[[], None]


def place_engines(num_engines: int, hosts: Hosts | None) -> EnginePlacement:
    """Room for engines; hosts that are not there yet are started, and stopped by `leave`.

    Raises:
        HostsError: the hosts could not be made.
    """
    host = probe()
    if hosts is None:
        devices = (*assign(num_engines, host), whole_host(host))
        return EnginePlacement(devices, (HERE,) * len(devices), LOOPBACK, _nothing)
    leave = _nothing
    if not hosts.is_up:
        hosts.start()
        leave = hosts.stop
    sites = (*(hosts.site(index) for index in hosts.seating(num_engines)), HERE)
    return EnginePlacement(
        (*hosts.devices(num_engines), whole_host(host)), sites, hosts.address, leave
    )


def require_one(num_engines: int, hosts: object, profile: object) -> None:
    """Refuses what cannot be meant.

    Raises:
        TypeError: `hosts` are none.
        ValueError: both `hosts` and a profile; or fewer engines than hosts.
    """
    if hosts is None:
        return
    if not isinstance(hosts, Hosts):
        raise TypeError(f"hosts are made by wb.Hosts(...), got {type(hosts).__name__}")
    if profile is not None:
        raise ValueError("engines run on emulated hosts or on those of a profile, not both")
    hosts.seating(num_engines)


def cluster_spec(
    num_engines: int,
    hosts: Hosts | None,
    launch: Launch | None,
    timeout_s: float,
    linger_s: float,
) -> tuple[Spec, Callable[[], None]]:
    """What a supervisor is told, and what ends that which was made for its engines only.

    Args:
        num_engines: how many, the assistant aside.
        hosts: emulated ones to run on.
        launch: how they get to others; their devices are known when those have come.
        timeout_s: how long a rank waits for the others.
        linger_s: how long the cluster stays when nobody needs it.

    Raises:
        HostsError: the emulated hosts could not be made.
    """
    if launch is not None:
        return Spec(launch=launch, timeout_s=timeout_s, linger_s=linger_s), _nothing
    ground = place_engines(num_engines, hosts)
    spec = Spec(
        devices=ground.devices,
        sites=ground.sites,
        address=ground.address,
        timeout_s=timeout_s,
        linger_s=linger_s,
        bound_to=None if hosts is None else Owner.here(),
    )
    return spec, ground.leave


def _nothing() -> None:
    pass
