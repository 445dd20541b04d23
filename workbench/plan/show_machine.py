"""Machines for people: one line of text, and HTML that also reads well where no kernel runs."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from workbench.plan.device import Device
from workbench.plan.link import Link

if TYPE_CHECKING:
    from workbench.plan.machine import Machine

_DEVICES = ("ranks", "device", "memory", "bandwidth", "products", "layer shapes", "figures")
_LINKS = ("link", "latency", "bandwidth", "sums", "collectives", "figures")


def headline(machine: "Machine") -> str:
    """The machine in one line."""
    device, count = machine.devices[0], len(machine.devices)
    ranks = "any number of ranks" if count == 1 else f"{count} ranks"
    shapes = sum(len(device.samples) for device in machine.devices)
    known = f"{shapes} measured layer shapes" if shapes else "no measured layer shapes"
    hosts = "" if machine.ranks_per_host is None else f", {machine.ranks_per_host} to a host"
    return f"<Machine {machine.name}: {ranks} on {device.name}{hosts}, {known}>"


def as_html(machine: "Machine") -> str:
    """Its devices and its links."""
    one = len(machine.devices) == 1
    devices = [
        ("all" if one else str(rank), *_device(device))
        for rank, device in enumerate(machine.devices)
    ]
    links = [link for link in (machine.within, machine.across) if link is not None]
    return (
        f"<div><p>{escape(headline(machine))}</p>{_table(_DEVICES, devices)}"
        f"{_table(_LINKS, map(_link, links))}"
        f"<p>A rank computes {machine.slowdown:.3g} times as long while a collective of its own "
        f"goes on.{_unequal(machine)}</p></div>"
    )


def _unequal(machine: "Machine") -> str:
    if machine.unevenness == 0 and machine.jitter_s == 0:
        return ""
    spread = (machine.unevenness**2 + machine.jitter_s) ** 0.5
    return f" What takes a second takes each rank {spread * 1e3:.3g} ms more or less."


def _device(device: Device) -> tuple[str, ...]:
    rates = ", ".join(f"{name} {_rate(rate, 'FLOP/s')}" for name, rate in device.flops.items())
    return (
        device.name,
        f"{device.memory_bytes / 1e9:.4g} GB",
        _rate(device.bandwidth, "B/s"),
        rates,
        str(len(device.samples)),
        device.source,
    )


def _link(link: Link) -> tuple[str, ...]:
    measured = sorted({f"{curve.op} of {curve.ranks}" for curve in link.curves})
    sums = 1 / link.reduction_s_per_byte if link.reduction_s_per_byte else 0.0
    return (
        link.name,
        f"{link.latency_s * 1e6:.3g} µs",
        _rate(link.bandwidth, "B/s"),
        _rate(sums, "B/s") if sums else "-",
        ", ".join(measured) or "by latency, bandwidth and sums",
        link.source,
    )


def _rate(value: float, unit: str) -> str:
    """For people: 3.35e12 B/s is "3.35 TB/s"."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    style = "style='text-align:left'"
    top = "".join(f"<th {style} scope='col'>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td {style}>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
