"""From a profile's launcher to a cluster's devices and sites: waits until all hosts are there.

What agents say of their hosts alone decides which engine is which agent's, and which cores or GPU
of that host it gets. Before a batch system's allocation ends, runs leave a checkpoint.
"""

import asyncio
import inspect
import logging
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
from ipyparallel.cluster.launcher import BatchSystemLauncher

from workbench.hosts.host import assign, probe, whole_host
from workbench.hosts.remote.reception import Hello, Reception, versions
from workbench.hosts.remote.wire import ANY, new_key
from workbench.store.cluster_spec import (
    HERE,
    ClusterSpec,
    EngineDevice,
    Launch,
    Site,
    identity,
    of_interface,
)
from workbench.store.errors import ClusterError
from workbench.store.record import JobState, Level
from workbench.store.store import Store

RELAY = "workbench.hosts.remote.relay"
AGENT = "workbench.hosts.remote.agent"
PACKAGE_IS_IN = Path(__file__).resolve().parents[3]
LOOK_EVERY_S = 0.1
LEAST_FREE = 24  # ports; the controller takes some twenty
LAST_WORDS = 1500  # characters
WORKING: tuple[JobState, ...] = ("queued", "starting", "running")


class Gathering:
    """Other hosts, for as long as they are needed.

    Raises:
        ClusterError: this host cannot listen as it is told to.
    """

    def __init__(self, folder: Path, launch: Launch) -> None:
        if not hasattr(signal, "sigtimedwait"):
            raise ClusterError(
                "a cluster whose engines are on other hosts is started on Linux, and this host has "
                f"{sys.platform}"
            )
        self._folder, self._launch = folder, launch
        self._ports = free_ports(launch)
        self._reception = Reception(
            new_key(folder), launch.address, None if self._ports is None else self._ports[:1]
        )
        self._agents = folder / "agents"
        (self._agents / "log").mkdir(parents=True, exist_ok=True)
        self._launcher: Any = None
        self._chosen: list[Hello] = []

    @property
    def ports(self) -> tuple[int, ...]:
        """Those that are left for the controller and the store; none: any."""
        return () if self._ports is None else self._ports[1:]

    @property
    def is_over(self) -> bool:
        """Whether all agents have gone that this cluster had."""
        return bool(self._chosen) and not self._reception.there

    async def gather(self, spec: ClusterSpec) -> ClusterSpec:
        """Starts agents and waits for them; the cluster, as it is then.

        Raises:
            ClusterError: they did not all come, or cannot work; the text says why.
        """
        await self._start()
        deadline = time.monotonic() + self._launch.start_within_s
        while len(there := self._reception.there) < self._launch.engines:
            if self._launcher.state == "after" or time.monotonic() > deadline:
                raise ClusterError(self._too_few(len(there)))
            await asyncio.sleep(LOOK_EVERY_S)
        self._chosen = choose([hello for hello, _ in there], self._launch.engines)
        require_same(self._chosen, versions())
        self._reception.dismiss(self._chosen)
        reached = {address for hello, address in there if hello in self._chosen}
        if len(reached) > 1:
            raise ClusterError(
                f"hosts reach this one by several of its addresses, {', '.join(sorted(reached))}: "
                "Profile(address=...) says which one to take"
            )
        ends = [hello.ends_at for hello in self._chosen if hello.ends_at is not None]
        return replace(
            spec,
            devices=(*devices_of(self._chosen), whole_host(probe())),
            sites=(*sites_of(self._chosen, self._folder, spec.lease_s), HERE),
            address=reached.pop(),
            ends_at=min(ends, default=None),
        )

    def close(self) -> None:
        """Lets the hosts go, and ends what is left of the launcher here.

        A batch system is told, also where it has started nothing yet.
        """
        self._reception.close()
        if isinstance(self._launcher, BatchSystemLauncher) and self._launcher.state == "running":
            with suppress(Exception):  # it has ended by itself
                self._launcher.stop()
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()  # ssh, which waits for an answer of a host that may be gone

    async def _start(self) -> None:
        """Starts the launcher that the profile names."""
        log = logging.getLogger(__name__)
        log.setLevel(logging.CRITICAL)
        agent = ["env", f"PYTHONPATH={PACKAGE_IS_IN}", sys.executable, "-P", "-m", AGENT]
        told = [str(self._folder), self._reception.nonce, self._reception.places]
        try:
            cluster = ipyparallel.Cluster(
                profile_dir=self._launch.config,
                cluster_id=f"{identity(self._folder)}-hosts",
                cluster_file="",
                shutdown_atexit=False,
                parent=None,
                log=log,
            )
            log_in_once(cluster.config, self._launch.engines)
            self._launcher = cluster.engine_launcher_class(
                work_dir=str(self._agents),
                parent=cluster,
                log=log,
                profile_dir=str(self._agents),
                cluster_id=cluster.cluster_id,
                engine_set_id="agents",
                engine_cmd=[*agent, *told, self._launch.interface or ANY],
            )
            started = self._launcher.start(self._launch.engines)
            if inspect.isawaitable(started):
                await started
        except Exception as error:
            raise ClusterError(
                f"the launcher that {self._launch.config} names started nothing: "
                f"{type(error).__name__}: {error}{_output_of(error)}"
            ) from error

    def _too_few(self, count: int) -> str:
        name = type(self._launcher).__name__
        said = ""
        with suppress(Exception):  # it has written nothing, or where we cannot read it
            said = self._launcher.get_output(remove=False)[-LAST_WORDS:]
        ended = " and the launcher has ended" if self._launcher.state == "after" else ""
        waited = f"after {self._launch.start_within_s:g} s" if not ended else ""
        # Whoever sees a command line may complain: it ends nothing, and says why too few have come.
        complaint = self._reception.complaint[:LAST_WORDS]
        return (
            f"{complaint}{': ' if complaint else ''}"
            f"{count} of {self._launch.engines} agents have come {waited}{ended}; {name} of "
            f"{self._launch.config} was to start them, and they were to register at "
            f"{self._reception.places}. What they wrote:\n{said or 'nothing'}"
        )


def choose(there: Sequence[Hello], engines: int) -> list[Hello]:
    """Returns as many agents as there are engines, in the engines' order: host by host.

    Hosts come in the order of their launcher's processes; where it does not number those, in the
    order of their names.

    Raises:
        ClusterError: there are too few agents.
    """
    if len(there) < engines:
        raise ClusterError(
            f"{engines} engines need as many agents, and {len(there)} have registered"
        )
    last = max((hello.slot or 0 for hello in there), default=0) + 1

    def place(hello: Hello) -> tuple[int, str, int]:
        return (last if hello.slot is None else hello.slot, hello.host.name, hello.port)

    chosen = sorted(there, key=place)[:engines]
    names = list(dict.fromkeys(hello.host.name for hello in chosen))
    return sorted(chosen, key=lambda hello: (names.index(hello.host.name), place(hello)))


def devices_of(chosen: Sequence[Hello]) -> tuple[EngineDevice, ...]:
    """Returns the device of each engine.

    Agents that may use the same cores and GPUs of a host divide them. Those that a launcher has
    bound to cores or GPUs of their own (Slurm's `--cpu-bind`, `--gpus-per-task`, mpirun's
    `--bind-to`) keep them.
    """
    found: list[EngineDevice | None] = [None] * len(chosen)
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


def sites_of(chosen: Sequence[Hello], folder: Path, lease_s: float) -> tuple[Site, ...]:
    """Returns how each engine's place is reached.

    Args:
        chosen: the agents of the engines, in the engines' order.
        lease_s: the seconds after which a host that is silent counts as lost.
    """
    relay = (sys.executable, "-P", "-m", RELAY)
    return tuple(
        Site(
            (*relay, hello.address, str(hello.port), str(folder), str(lease_s)),
            of_interface(hello.interface),
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


def _sharers(own: EngineDevice, devices: Sequence[EngineDevice]) -> int:
    """Returns how many engines have a device's GPU, or its cores."""
    if own.kind == "cuda":
        return sum((other.host, other.gpu) == (own.host, own.gpu) for other in devices)
    cores = set(own.cores)
    return sum(other.host == own.host and not cores.isdisjoint(other.cores) for other in devices)


def free_ports(launch: Launch) -> tuple[int, ...] | None:
    """Returns those of the wanted ports that are free; None: any will do.

    Raises:
        ClusterError: fewer ports are free than a cluster needs.
    """
    if launch.ports is None:
        return None
    found = []
    for port in range(launch.ports[0], launch.ports[1] + 1):
        with suppress(OSError), socket.create_server((launch.address, port)):
            found.append(port)
    if len(found) < LEAST_FREE:
        raise ClusterError(
            f"of ports {launch.ports[0]} to {launch.ports[1]}, too few are free: {len(found)}, and "
            f"{LEAST_FREE} at least are needed; Profile(ports=...) says which ones to take"
        )
    return tuple(found)


def log_in_once(config: Any, engines: int) -> None:
    """Has the SSH launcher log into each host once, for all agents there.

    It would for each engine, some seconds each time, one after another; and would send files that
    agents find in the cluster's folder.

    Args:
        config: the configuration of a profile, which is changed.

    Raises:
        ClusterError: the profile has too few engines.
    """
    config.SSHEngineLauncher.to_send = []
    known = config.SSHEngineSetLauncher.get("engines", {})
    once, left = {}, engines
    for host, asked in known.items():
        settings = dict(asked) if isinstance(asked, dict) else {"n": asked}
        count = min(settings.pop("n", 1), left)
        left -= count
        if count:
            once[host] = {**settings, "n": 1, "engine_args": [str(count)]}
    if once:
        if left:
            raise ClusterError(
                f"the hosts of the profile's SSHEngineSetLauncher.engines have {engines - left} "
                f"engines in all, not {engines}"
            )
        config.SSHEngineSetLauncher.engines = once


def _output_of(error: Exception) -> str:
    output = getattr(error, "stderr", None) or getattr(error, "output", None) or b""
    return f"\n{output.decode(errors='replace')}" if isinstance(output, bytes) and output else ""


class AllocationLimit:
    """Pauses what trains, some time before the hosts are taken away.

    Args:
        ends_at: when the hosts are taken away, in seconds since the epoch; None: never, as far as
            is known.
        notice_s: the seconds before that in which runs are paused.
    """

    def __init__(self, store: Store, ends_at: float | None, notice_s: float) -> None:
        self._store, self._ends_at, self._notice_s = store, ends_at, notice_s
        self._asked: set[tuple[int, int]] = set()  # jobs, and which attempt was to end
        self._is_told = False

    def announce(self) -> None:
        """Tells people when the hosts are taken away."""
        if self._ends_at is not None:
            self._tell(
                f"the hosts are there until {_clock(self._ends_at)}; runs are paused "
                f"{self._notice_s:g} s before that",
                "info",
            )

    def look(self, now: float) -> None:
        """Does what is due.

        Args:
            now: the time, in seconds since the epoch.
        """
        if self._ends_at is None or now < self._ends_at - self._notice_s:
            return
        if not self._is_told:
            self._is_told = True
            self._tell(
                f"the hosts are taken away at {_clock(self._ends_at)}: runs are paused, each with "
                "a checkpoint; cluster.restart() asks for hosts again, and run.resume() goes on",
                "warning",
            )
        for job in self._store.jobs(states=WORKING):
            if (
                job.kind == "train"
                and not job.requested
                and (job.id, job.attempt) not in self._asked
            ):
                self._asked.add((job.id, job.attempt))
                self._store.command("pause", job.id)

    def _tell(self, text: str, level: Level) -> None:
        self._store.event(text, kind="limit", level=level)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
