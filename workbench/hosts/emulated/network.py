"""Network namespaces on a switch: hosts that reach each other through shaped links only.

A network with the tag T is, all of it removed by `remove(T)`:

    T-switch     a namespace with a bridge; each port's egress is shaped: a host's downlink
    T-host<i>    a namespace with `eth0`, whose egress is shaped: the host's uplink; and `lo`
    T            an interface of this namespace on the switch, not shaped: for control messages

The bridge has a namespace of its own because in this one it might be subject to a firewall.
"""

import ipaddress
import json
import os
from dataclasses import dataclass
from pathlib import Path

from workbench.hosts.emulated.link import Link
from workbench.hosts.emulated.tags import abandoned, belongs
from workbench.hosts.emulated.tools import call
from workbench.store.errors import HostsError

INTERFACE = "eth0"  # in each host's namespace
NAMESPACES = Path("/run/netns")
ADDRESSES = ipaddress.IPv4Network("198.18.0.0/15")  # for measurements inside a site: RFC 2544
PREFIX = 24
MOST_HOSTS = 250


@dataclass(frozen=True)
class Network:
    """Hosts on a switch.

    Attributes:
        tag: in the names of all that belongs to it.
        address: of this process, as the hosts see it.
        addresses: of each host.
    """

    tag: str
    address: str
    addresses: tuple[str, ...]

    def namespace(self, index: int) -> Path:
        """The file that stands for a host's network namespace."""
        return NAMESPACES / f"{self.tag}-host{index}"


def make(tag: str, count: int, link: Link) -> Network:
    """Makes `count` hosts; whoever calls removes them, also where this fails.

    Raises:
        HostsError: a tool failed, or there is no address to be had.
    """
    subnet = _free_subnet()
    network = Network(
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
        HostsError: something of it cannot be removed.
    """
    # First, and at once: with its namespace it would go later, and keep its address until then.
    if Path("/sys/class/net", tag).exists():
        call("ip", "link", "delete", tag)
    for name in names():
        if belongs(name, tag):
            call("ip", "netns", "delete", name)


def recover() -> None:
    """Removes the networks of processes that have ended without doing so."""
    for tag in abandoned(names()):
        remove(tag)


def names() -> list[str]:
    """Of all namespaces that have one."""
    return [path.name for path in NAMESPACES.glob("*")]


def _plug(port: str, switch: str, interface: str, inside: tuple[str, ...]) -> None:
    """Connects a new interface, of this namespace or of the one `inside`, to a new port."""
    end = ["name", interface, "netns", inside[-1] if inside else str(os.getpid())]
    call("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", *end)
    # No IPv6 addresses: nobody needs them, and looking for neighbours would take turns.
    up = ("up", "addrgenmode", "none")
    call("ip", "-n", switch, "link", "set", port, "master", "switch", *up)
    call("ip", *inside, "link", "set", interface, *up)


def _shape(namespace: str, interface: str, link: Link) -> None:
    rate = ["rate", f"{link.bits_per_s:.0f}bit", "burst", str(link.burst_bytes)]
    latency = ["latency", f"{link.latency_s * 1e6:.0f}us"]
    call(*["tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf"], *rate, *latency)


def _free_subnet() -> ipaddress.IPv4Network:
    """Addresses to which this namespace has no route yet, its default aside."""
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
