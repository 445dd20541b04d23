"""Which engine is which agent's, and what of its host it gets; from what agents said alone."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from workbench.cluster.devices import Device, assign
from workbench.cluster.errors import ClusterError
from workbench.cluster.launchers.hello import Hello
from workbench.cluster.site import Site, of_interface

RELAY = "workbench.cluster.launchers.relay"


def choose(there: Sequence[Hello], engines: int) -> list[Hello]:
    """As many agents as there are engines, in the engines' order: host by host.

    Hosts come in the order of their launcher's processes; where it does not number those, in the
    order of their names.

    Raises:
        ClusterError: there are too few.
    """
    if len(there) < engines:
        raise ClusterError(f"{len(there)} agents for {engines} engines")
    last = max((hello.slot or 0 for hello in there), default=0) + 1

    def place(hello: Hello) -> tuple[int, str, int]:
        return (last if hello.slot is None else hello.slot, hello.host.name, hello.port)

    chosen = sorted(there, key=place)[:engines]
    names = list(dict.fromkeys(hello.host.name for hello in chosen))
    return sorted(chosen, key=lambda hello: (names.index(hello.host.name), place(hello)))


def devices_of(chosen: Sequence[Hello]) -> tuple[Device, ...]:
    """What each engine computes on.

    Agents that may use the same cores and GPUs of a host divide them. Those that a launcher has
    bound to cores or GPUs of their own (Slurm's `--cpu-bind`, `--gpus-per-task`, mpirun's
    `--bind-to`) keep them.
    """
    found: list[Device | None] = [None] * len(chosen)
    for host in {(hello.host.name, hello.host.cores, hello.host.gpus) for hello in chosen}:
        alike = [
            index
            for index, hello in enumerate(chosen)
            if (hello.host.name, hello.host.cores, hello.host.gpus) == host
        ]
        devices = assign(len(alike), chosen[alike[0]].host)
        for index, device in zip(alike, devices, strict=True):
            found[index] = device
    devices = tuple(device for device in found if device is not None)
    return tuple(replace(own, sharers=_sharers(own, devices)) for own in devices)


def sites_of(
    chosen: Sequence[Hello], folder: Path, environment: Mapping[str, str]
) -> tuple[Site, ...]:
    """How each engine's place is reached.

    Args:
        chosen: its agents.
        folder: of the cluster.
        environment: what all engines are told.
    """
    relay = (sys.executable, "-P", "-m", RELAY)
    return tuple(
        Site(
            (*relay, hello.address, str(hello.port), str(folder)),
            {**environment, **of_interface(hello.interface)},
        )
        for hello in chosen
    )


def require_same(chosen: Sequence[Hello], here: Mapping[str, str]) -> None:
    """Raises ClusterError unless all hosts have the versions that this one has."""
    for hello in chosen:
        for name, version in here.items():
            if (there := hello.versions.get(name)) != version:
                raise ClusterError(
                    f"{hello.host.name} has {name} {there}, and this host {version}: engines "
                    "need the same Python environment on all hosts"
                )


def _sharers(own: Device, devices: Sequence[Device]) -> int:
    """How many engines have a device's GPU, or its cores."""
    if own.kind == "cuda":
        return sum((other.host, other.gpu) == (own.host, own.gpu) for other in devices)
    cores = set(own.cores)
    return sum(other.host == own.host and not cores.isdisjoint(other.cores) for other in devices)
