"""Network namespaces on a switch: hosts that reach each other through shaped links only.

A network with the tag T is, all of it removed by `remove(T)`:

    T-switch     a namespace with a bridge; each port's egress is shaped: a host's downlink
    T-host<i>    a namespace with `eth0`, whose egress is shaped: the host's uplink; and `lo`
    T            an interface of this namespace on the switch, not shaped: for control messages

The bridge has a namespace of its own because in this one it might be subject to a firewall. A tag
is wb<process id>-<number>, so that what a process has left behind is known for it; what belongs to
one network is named <tag>-<what>.
"""

import ipaddress
import itertools
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from workbench.hosts.processes import is_alive
from workbench.plan.io.units import BITS, bandwidth_of
from workbench.store.errors import HostsError

INTERFACE = "eth0"  # in each host's namespace
NAMESPACES = Path("/run/netns")
ADDRESSES = ipaddress.IPv4Network("198.18.0.0/15")  # for measurements inside a site: RFC 2544
PREFIX = 24
MOST_HOSTS = 250

LEAST_BURST_BYTES = 2048  # a packet that is larger than the bucket would never pass
LEAST_BANDWIDTH = 125.0  # bytes/s: 1 kbit/s

LOCK = "/run/workbench-hosts.lock"
LOCK_WITHIN_S = 60.0

PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "taskset": "util-linux",
    "sh": "dash",
    "env": "coreutils",
}


@dataclass(frozen=True)
class ShapedLink:
    """A token bucket each way: what leaves a host, and what reaches it.

    Attributes:
        bandwidth: the rate in bytes/s, every header of a packet included.
        burst_bytes: the bytes that pass at once after a pause.
        queue_limit_s: the seconds that a packet waits for its turn, at most; one that would wait
            longer is dropped, as in a switch whose buffer is full.

    Raises:
        ValueError: no link can have this rate, burst or queue limit.
    """

    bandwidth: float
    burst_bytes: int
    queue_limit_s: float

    def __post_init__(self) -> None:
        if not LEAST_BANDWIDTH <= self.bandwidth < float("inf"):
            raise ValueError(
                f"a bandwidth is at least 125 bytes/s (1 kbit/s), got {self.bandwidth!r} bytes/s"
            )
        if self.burst_bytes < LEAST_BURST_BYTES:
            raise ValueError(
                f"a burst is at least {LEAST_BURST_BYTES} bytes, got {self.burst_bytes}"
            )
        if not 0 < self.queue_limit_s < float("inf"):
            raise ValueError(
                f"queue_limit_s is a positive number of seconds, got {self.queue_limit_s}"
            )

    @classmethod
    def of(
        cls, bandwidth: str | float, burst_bytes: int | None, queue_limit_s: float
    ) -> "ShapedLink":
        """Returns a link; a burst of None is one millisecond's, but 16 KiB at least."""
        rate = bandwidth_of(bandwidth)
        if burst_bytes is None and math.isfinite(rate):
            burst_bytes = max(16 << 10, int(rate / 1e3))
        return cls(rate, burst_bytes or 0, queue_limit_s)

    def __str__(self) -> str:
        bits = 8 * self.bandwidth
        unit = next(name for name, size in reversed(BITS.items()) if bits >= size)
        return f"{bits / BITS[unit]:g}{unit}"


@dataclass(frozen=True)
class HostNetwork:
    """Hosts on a switch.

    Attributes:
        tag: the tag in the names of all that belongs to it.
        address: the address of this process, as the hosts see it.
    """

    tag: str
    address: str
    addresses: tuple[str, ...]

    def namespace(self, index: int) -> Path:
        """Returns the file that stands for a host's network namespace."""
        return NAMESPACES / f"{self.tag}-host{index}"

    def set_port(self, index: int, state: Literal["up", "down"]) -> None:
        """Has the switch's port of a host let packets pass, or none in either direction.

        Raises:
            HostsError: it could not be done.
        """
        call("ip", "-n", f"{self.tag}-switch", "link", "set", f"port{index}", state)


def make(tag: str, count: int, link: ShapedLink) -> HostNetwork:
    """Makes `count` hosts; whoever calls removes them, also where this fails.

    Raises:
        HostsError: a tool failed, or there is no address to be had.
    """
    subnet = _free_subnet()
    network = HostNetwork(
        tag,
        str(subnet[MOST_HOSTS + 1]),
        tuple(str(subnet[index + 1]) for index in range(count)),
    )
    switch = f"{tag}-switch"
    call("ip", "netns", "add", switch)
    call("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
    call("ip", "-n", switch, "link", "set", "switch", "up", "addrgenmode", "none")
    _plug("control", switch, tag, inside=())
    call("ip", "addr", "add", f"{network.address}/{PREFIX}", "dev", tag)
    for index, address in enumerate(network.addresses):
        host, port = f"{tag}-host{index}", f"port{index}"
        call("ip", "netns", "add", host)
        call("ip", "-n", host, "link", "set", "lo", "up")
        _plug(port, switch, INTERFACE, inside=("-n", host))
        call("ip", "-n", host, "addr", "add", f"{address}/{PREFIX}", "dev", INTERFACE)
        _shape(host, INTERFACE, link)
        _shape(switch, port, link)
    return network


def remove(tag: str) -> None:
    """Removes all of a network that is there.

    Raises:
        HostsError: something of the network cannot be removed.
    """
    # First, and at once: with its namespace it would go later, and keep its address until then.
    # What /sys shows may be of another network namespace than this process's.
    if tag in (name for _, name in socket.if_nameindex()):
        call("ip", "link", "delete", tag)
    for name in names():
        if belongs(name, tag):
            call("ip", "netns", "delete", name)


def recover() -> None:
    """Removes the networks of processes that have ended without doing so."""
    for tag in abandoned(names()):
        remove(tag)


def names() -> list[str]:
    """Returns the names of all network namespaces that have one."""
    return [path.name for path in NAMESPACES.glob("*")]


def _plug(port: str, switch: str, interface: str, inside: tuple[str, ...]) -> None:
    """Connects a new interface, of this namespace or of the one `inside`, to a new port."""
    end = ["name", interface, "netns", inside[-1] if inside else str(os.getpid())]
    call("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", *end)
    # No IPv6 addresses: nobody needs them, and looking for neighbours would take turns.
    up = ("up", "addrgenmode", "none")
    call("ip", "-n", switch, "link", "set", port, "master", "switch", *up)
    call("ip", *inside, "link", "set", interface, *up)


def _shape(namespace: str, interface: str, link: ShapedLink) -> None:
    rate = ["rate", f"{8 * link.bandwidth:.0f}bit", "burst", str(link.burst_bytes)]
    latency = ["latency", f"{link.queue_limit_s * 1e6:.0f}us"]
    call(*["tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf"], *rate, *latency)


def _free_subnet() -> ipaddress.IPv4Network:
    """Returns addresses to which this namespace has no route yet, its default aside."""
    routes = json.loads(call("ip", "-json", "-4", "route", "show", "table", "all"))
    known = [
        ipaddress.IPv4Network(route["dst"], strict=False)
        for route in routes
        if route["dst"] not in ("default", "0.0.0.0/0")
    ]
    for subnet in ADDRESSES.subnets(new_prefix=PREFIX):
        if not any(subnet.overlaps(other) for other in known):
            return subnet
    raise HostsError(
        f"this host has routes to all of {ADDRESSES}, of which emulated hosts take some"
    )


@contextmanager
def alone() -> Iterator[None]:
    """Lets one process of this machine at a time find what is free, and take it.

    Raises:
        HostsError: another process does not come to an end with it.
    """
    try:
        held = FileLock(LOCK).acquire(timeout=LOCK_WITHIN_S)
    except Timeout as error:
        raise HostsError(f"another process has held {LOCK} for {LOCK_WITHIN_S:g} s") from error
    with held:
        yield


def new_tag(names: Iterable[str]) -> str:
    """Returns a tag of this process that none of these names has.

    It is an interface's name too, which has at most 15 bytes.
    """
    taken = list(names)
    for number in itertools.count():
        tag = f"wb{os.getpid()}-{number}"
        if not any(belongs(name, tag) for name in taken):
            return tag
    raise AssertionError("unreachable")


def belongs(name: str, tag: str) -> bool:
    """Returns whether a name has this tag."""
    return name.startswith(f"{tag}-")


def abandoned(names: Iterable[str]) -> set[str]:
    """Returns the tags in these names whose process has ended."""
    found = (re.match(r"(wb(\d+)-\d+)-", name) for name in names)
    return {match[1] for match in found if match and not is_alive(int(match[2]))}


def require() -> None:
    """Raises HostsError unless this process may make emulated hosts, as far as one can see."""
    if not sys.platform.startswith("linux"):
        raise HostsError(_needs(f"this system is {sys.platform}"))
    if os.geteuid() != 0:
        raise HostsError(_needs(f"this process has the user id {os.geteuid()}"))
    if absent := [tool for tool in PACKAGES if shutil.which(tool) is None]:
        packages = " ".join(dict.fromkeys(PACKAGES[tool] for tool in absent))
        raise HostsError(
            f"emulated hosts need {', '.join(absent)}, which cannot be found: install {packages} "
            f"(Debian, Ubuntu: apt-get install {packages})"
        )


def call(*command: str) -> str:
    """Runs one of the system's tools; returns what it writes.

    Raises:
        HostsError: the tool failed; the text holds its words.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip() or f"exit status {done.returncode}"
        raise HostsError(f"`{' '.join(command)}` failed: {said}{_hint(said)}")
    return done.stdout


def _needs(but: str) -> str:
    return (
        "emulated hosts need root on Linux, for network namespaces, tc and control groups; "
        f"{but}. Without them wb.Cluster(n) still works: all its engines are on this one host, "
        "equally fast, with no shaped links between them, and train, verify and bench run on it"
    )


def _hint(said: str) -> str:
    if "not permitted" in said or "denied" in said:
        return (
            ". This root lacks capabilities: a container needs CAP_SYS_ADMIN and CAP_NET_ADMIN "
            "(docker run --privileged)"
        )
    if "qdisc kind is unknown" in said or "qdisc not found" in said:
        return ". This kernel lacks the module sch_tbf"
    return ""
