"""Several hosts on this one: their own network, shaped links, processors of unequal speed."""

import subprocess
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from workbench.hosts.emulated import login, network
from workbench.hosts.emulated.measuring import HostMeasurement, measure
from workbench.hosts.emulated.network import ShapedLink
from workbench.hosts.emulated.quota import CpuController
from workbench.hosts.host import Host, assign, divide, probe
from workbench.plan.io.html import Markup, element, frame_of, save, table
from workbench.plan.placement.placement import apportion
from workbench.store.cluster_spec import EngineDevice, Site, of_interface
from workbench.store.errors import HostsError

LEAST_SPEED = 0.01
if TYPE_CHECKING:
    import pandas

INTERFACE = of_interface(network.INTERFACE)
# Each program replaces the one before, so that signals to the first one reach the last.
JOIN = 'echo $$ >"$1" && shift && exec "$@"'


class User(Protocol):
    """What runs on hosts and has to end before them."""

    def stop(self) -> None: ...


class Hosts:
    """Emulated hosts: network namespaces on a switch, with shaped links and processor quotas.

    They are there from `start()`, or the beginning of a `with` block, to `stop()`, or its end,
    and never longer than this process; what one that was killed has left, the next start removes.
    All that runs on them is shaped alike: the engines of a `Cluster(n, hosts=hosts)`, ours and a
    peer's code on them, and any program that `command` starts.

    A host has an equal part of this host's cores, and no GPU: no quota slows one down. Traffic
    between ranks of one emulated host does not pass its link, and may use shared memory.

    Args:
        count: the number of hosts.
        bandwidth: the bandwidth of each host's link, each way: "1gbit", "100mbit", or bytes/s.
        speeds: the part of its cores' time that each host gets, from 0.01 to 1; None: 1.
        burst_bytes: the bytes that pass a link at once after a pause; None: one millisecond's.
        queue_limit_s: the seconds that a packet waits for its turn on a link, at most; one that
            would wait longer is dropped, as in a switch whose buffer is full.

    Attributes:
        link: the links' rate, burst and queue limit.
        speeds: the part of its cores' time that each host gets.
        names: the names of the hosts.

    Raises:
        ValueError: an argument has no possible value.
    """

    def __init__(
        self,
        count: int,
        *,
        bandwidth: str | float = "1gbit",
        speeds: Sequence[float] | None = None,
        burst_bytes: int | None = None,
        queue_limit_s: float = 0.05,
    ) -> None:
        if isinstance(count, bool) or not isinstance(count, int):
            raise ValueError(f"the number of hosts is an integer, got {count!r}")
        if not 1 <= count <= network.MOST_HOSTS:
            raise ValueError(f"there are from 1 to {network.MOST_HOSTS} hosts, got {count}")
        self.link = ShapedLink.of(bandwidth, burst_bytes, queue_limit_s)
        self.speeds = (1.0,) * count if speeds is None else tuple(map(float, speeds))
        if len(self.speeds) != count:
            raise ValueError(
                f"speeds holds one number for each host, got {len(self.speeds)} speeds for "
                f"{count} hosts"
            )
        if not all(LEAST_SPEED <= speed <= 1 for speed in self.speeds):
            raise ValueError(
                f"speeds are relative to this host's own, from {LEAST_SPEED} to 1, got "
                f"{self.speeds}"
            )
        self.names = tuple(f"host{index}" for index in range(count))
        self._users: weakref.WeakSet[User] = weakref.WeakSet()
        self._up: Emulation | None = None
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Makes the hosts.

        Raises:
            HostsError: this process may not make hosts, or the system cannot; or they are there
                already.
        """
        if self._up is not None:
            raise HostsError(f"{self} are there already")
        network.require()
        self._up = Emulation(self.names, self.speeds, self.link)

    def stop(self) -> None:
        """Stops the clusters that run on the hosts, ends all that is left, removes the hosts.

        May be called again.

        Raises:
            HostsError: something of the hosts could not be removed.
        """
        up, self._up = self._up, None
        if up is not None:
            with ExitStack() as stack:  # one that fails shall not keep the others
                stack.callback(up.end)
                for user in self._users:
                    stack.callback(user.stop)
            self._users.clear()
            for daemon in self._daemons:  # ended with what they ran on
                daemon.wait()
            self._daemons.clear()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_up(self) -> bool:
        """Whether the hosts are there."""
        return self._up is not None

    @property
    def address(self) -> str:
        """This process' own, at which the hosts can reach it."""
        return self._there().network.address

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of each host."""
        return self._there().network.addresses

    @property
    def cores(self) -> tuple[tuple[int, ...], ...]:
        """Logical cores of each host."""
        return tuple(device.cores for device in self._there().devices)

    def command(self, index: int, argv: Sequence[str]) -> list[str]:
        """Returns a command line that runs another one on a host: on its network, cores and quota.

        It is for `subprocess` and the like. gloo and nccl are told the host's interface; a
        program that gives them addresses by itself takes them from `addresses`. A host has no
        way to the outside of its switch.

        Args:
            index: the index of the host.
            argv: the program and its arguments.

        Raises:
            HostsError: the hosts are not there.
        """
        site, up = self.site(index), self._there()
        cores = ",".join(map(str, up.devices[index].cores))
        join = ["sh", "-c", JOIN, "sh", str(up.groups[index])]
        environment = [f"{name}={value}" for name, value in INTERFACE.items()]
        return [*join, *site.enter, "taskset", "-c", cores, "env", *environment, *argv]

    def disconnect(self, index: int) -> None:
        """Pulls a host's cable: nothing reaches it, or leaves it, until `reconnect`.

        Args:
            index: the index of the host.

        Raises:
            HostsError: the hosts are not there.
        """
        self._there().network.set_port(index, "down")

    def reconnect(self, index: int) -> None:
        """Puts a host's cable back; what was sent meanwhile is sent again, where it is TCP's.

        Args:
            index: the index of the host.

        Raises:
            HostsError: the hosts are not there.
        """
        self._there().network.set_port(index, "up")

    def ssh(self, folder: str | Path, engines: int = 1) -> Path:
        """Lets people log into the hosts, as into any on a network: for practice.

        Each gets an sshd, which ends with it. Beside keys that are good for nothing else, the
        folder then has `ssh_config` and `ipcluster_config.py`: as an IPython profile, it has
        engines brought to these hosts, `Cluster(2, profile=folder)`.

        Args:
            folder: the folder for all of these files, which is made.
            engines: the number of engines on each host.

        Returns:
            The folder.

        Raises:
            HostsError: the hosts are not there, or nobody can log in; the text says why.
        """
        path = Path(folder).absolute()
        addresses = self._there().network.addresses
        self._daemons += login.serve(self.command, self.names, addresses, path, engines)
        return path

    def site(self, index: int) -> Site:
        """Returns what an engine needs to run on a host."""
        up = self._there()
        # It joins when it is ready to work: a slow host's imports would take long.
        joins = {"WORKBENCH_GROUP": str(up.groups[index])}
        namespace = up.network.namespace(index)
        return Site(("nsenter", f"--net={namespace}", "--"), {**INTERFACE, **joins})

    def seating(self, num_engines: int) -> tuple[int, ...]:
        """Returns the host of each engine: the first ones on the first host, and so on.

        Raises:
            ValueError: there are fewer engines than hosts.
        """
        count = len(self.names)
        if num_engines < count:
            raise ValueError(f"{count} hosts need as many engines at least, got {num_engines}")
        shares = apportion(num_engines, (1,) * count)
        return tuple(index for index, share in enumerate(shares) for _ in range(share))

    def devices(self, num_engines: int) -> tuple[EngineDevice, ...]:
        """Returns the device of each engine."""
        seating = self.seating(num_engines)
        devices = [
            device
            for index, part in enumerate(self._there().parts)
            for device in assign(seating.count(index), part)
        ]
        return tuple(
            replace(own, sharers=sum(not {*own.cores}.isdisjoint(other.cores) for other in devices))
            for own in devices
        )

    def attach(self, user: User) -> None:
        """Has `user` stopped before the hosts are removed; it is not kept alive."""
        self._users.add(user)

    def measure(self, seconds: float = 0.5) -> HostMeasurement:
        """Keeps all cores busy, then all links, and says what each host got.

        Args:
            seconds: the seconds for the processors, and again for the links.

        Raises:
            ValueError: the time is not positive.
            HostsError: the hosts are not there, or one did not answer.
        """
        if not 0 < seconds < float("inf"):
            raise ValueError(f"measuring takes a positive number of seconds, got {seconds}")
        threads = [device.threads for device in self._there().devices]
        return measure(self.command, self.addresses, threads, seconds)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        speeds = "" if set(self.speeds) == {1.0} else f", speeds={self.speeds}"
        state = "" if self.is_up else ": not started"
        return f"<Hosts({len(self)}, bandwidth='{self.link}'{speeds}){state}>"

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each host, once they are there; the bandwidth is in bytes/s."""
        rows = []
        if self.is_up:
            cells = zip(self.names, self.addresses, self.cores, self.speeds, strict=True)
            rows = [
                {
                    "host": name,
                    "address": address,
                    "cores": cores,
                    "speed": speed,
                    "bandwidth": self.link.bandwidth,
                }
                for name, address, cores, speed in cells
            ]
        return frame_of(rows, ("host", "address", "cores", "speed", "bandwidth"))

    def save(self, path: str | Path) -> None:
        """Writes its table into a file: "x.html" or "x.csv".

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path)

    def _repr_html_(self) -> Markup:
        return _html(self)

    def _there(self) -> "Emulation":
        if self._up is None:
            raise HostsError(
                f"{self} are not there: use them in `with wb.Hosts(...) as hosts:`, or between "
                "start() and stop()"
            )
        return self._up


def _html(hosts: Hosts) -> Markup:
    """Returns a table with one line for each emulated host."""
    line = element("p", repr(hosts))
    if not hosts.is_up:
        return element("div", line)
    rows = [
        (name, address, ", ".join(map(str, cores)), f"{speed:g}", str(hosts.link))
        for name, address, cores, speed in zip(
            hosts.names, hosts.addresses, hosts.cores, hosts.speeds, strict=True
        )
    ]
    return element("div", line, table(("host", "address", "cores", "speed", "link"), rows))


class Emulation:
    """The hosts' network and control groups; what processes that died left of theirs is removed.

    Attributes:
        devices: the device that one engine would have if it had a host for itself, for each host.
        groups: the file of each host that takes a process into its control group.
        end: a function that removes all of it and ends what runs in it. It is called also when the
            last reference goes, and before the interpreter does.

    Raises:
        HostsError: the system refused; nothing is left.
    """

    def __init__(self, names: Sequence[str], speeds: Sequence[float], link: ShapedLink) -> None:
        self.parts: tuple[Host, ...] = divide(probe(), names)
        self.devices: tuple[EngineDevice, ...] = tuple(assign(1, part)[0] for part in self.parts)
        controller = CpuController.find()
        with network.alone():
            network.recover()
            controller.recover()
            tag = network.new_tag([*network.names(), *controller.names()])
            self.end = weakref.finalize(self, _remove, tag, controller)
            try:
                self.network = network.make(tag, len(names), link)
                self.groups: tuple[Path, ...] = tuple(
                    # A thread keeps a core busy, so there are as many cores' worth of time.
                    controller.make(tag, index, None if speed == 1 else speed * device.threads)
                    for index, (speed, device) in enumerate(zip(speeds, self.devices, strict=True))
                )
            except BaseException:
                self.end()
                raise


def _remove(tag: str, controller: CpuController) -> None:
    with ExitStack() as stack:  # also where something runs on and its group cannot be removed
        stack.callback(network.remove, tag)
        controller.remove(tag)
