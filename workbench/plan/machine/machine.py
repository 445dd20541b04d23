"""The machine: devices that compute and links between them, as one value."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator

from workbench.plan.io.errors import MachineError, unknown
from workbench.plan.io.files import about, text_of, toml_of
from workbench.plan.io.html import Markup, element, frame_of, save_value, table
from workbench.plan.io.value import MachineValue, dump
from workbench.plan.machine.device import Device, Link, Precision
from workbench.plan.machine.presets import KNOWN

if TYPE_CHECKING:
    import pandas

_DEVICES = (
    "ranks",
    "device",
    "memory",
    "bandwidth",
    "products",
    "layer shapes",
    "workspaces",
    "figures",
)

_LINKS = ("link", "latency", "bandwidth", "sums", "collectives", "figures")


class Machine(MachineValue):
    """The machine that an experiment runs on: measured by `cluster.calibrate()`, or known by name.

    Raises:
        MachineError: a field has a wrong type or value; the text names it.
    """

    _measure: ClassVar[Callable[..., "Machine"] | None] = None  # set by the facade

    name: str
    """What it is called, for people."""
    devices: tuple[Device, ...] = Field(min_length=1)
    """One device, which every rank of a world of any size has; or one for each rank, so that a plan
    has no more ranks than there are devices, and a smaller one uses the first."""
    within: Link
    """The link between ranks of one host."""
    across: Link | None = None
    """The link between hosts."""
    ranks_per_host: int | None = Field(default=None, ge=1)
    """The number of ranks on each host; None: all ranks are on one host."""
    slowdown: float = Field(default=1.0, ge=1)
    """The factor by which a rank computes slower while a collective of its own is running."""
    unevenness: float = Field(default=0.0, ge=0)
    """The standard deviation of ranks' times for equal work, relative to the mean, which lasts for
    a step."""
    jitter_s: float = Field(default=0.0, ge=0)
    """The further variance of these times, in seconds squared for each second of work, which arises
    anew at every moment."""

    @model_validator(mode="after")
    def _hosts_are_linked(self) -> Self:
        if self.ranks_per_host is not None and self.across is None:
            raise ValueError(
                f"ranks_per_host {self.ranks_per_host} means several hosts, "
                "which need a link `across`"
            )
        return self

    @property
    def own_gpus(self) -> bool:
        """Whether ranks have GPUs of their own, or some of them: these share no memory."""
        return any(one.kind == "cuda" and one.sharers == 1 for one in self.devices)

    def device(self, rank: int) -> Device:
        """The device of a rank.

        Raises:
            MachineError: the machine has measured devices, and none for this rank.
        """
        if len(self.devices) == 1:
            return self.devices[0]
        if not 0 <= rank < len(self.devices):
            raise MachineError(
                f"machine {self.name!r} has devices of ranks 0 to {len(self.devices) - 1}, "
                f"none of rank {rank}"
            )
        return self.devices[rank]

    def link(self, ranks: Sequence[int]) -> Link:
        """The link between these ranks of the world: `across` if they are on several hosts."""
        if self.across is None or self.ranks_per_host is None:
            return self.within
        first, last = min(ranks), max(ranks)
        same = first // self.ranks_per_host == last // self.ranks_per_host
        return self.within if same else self.across

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """The names of the known machines."""
        return tuple(KNOWN)

    @classmethod
    def preset(cls, name: str) -> "Machine":
        """A known machine, from data sheets.

        Raises:
            MachineError: no known machine has this name; the nearest are suggested.
        """
        if name not in KNOWN:
            raise MachineError(unknown("machine", str(name), KNOWN))
        return cls(name=name, **KNOWN[name])

    @classmethod
    def local(
        cls,
        *what: Any,
        rows: int | Sequence[int] = (8, 32),
        precision: Precision = "fp32",
    ) -> "Machine":
        """Measures this host in this process, without engines, in some seconds.

        It loads torch. What kernels of plans take beside their tensors is measured here as an
        engine would, shape by shape, so that memory is predicted without a band. Links are assumed,
        and layers not timed: `cluster.calibrate` measures these too.

        Args:
            what: the plans whose layers are measured; or graphs, whose layers are measured whole.
            rows: the rows of a batch on each rank; fewer rows are known then, too.
            precision: the precision of the layers.

        Raises:
            TypeError: something else than graphs and plans.
            ValueError: there are no rows.
        """
        if cls._measure is None:
            raise MachineError("Machine.local is wb.Machine.local, after import workbench as wb")
        return cls._measure(what, rows, precision)

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that change when anything about the machine changes."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]

    def to_toml(self) -> str:
        """The machine as readable, editable text."""
        fields = self.model_dump(exclude_none=True, exclude_defaults=True)
        devices, within = fields.pop("devices"), fields.pop("within")
        across = fields.pop("across", None)
        links = {"within": within} if across is None else {"within": within, "across": across}
        return dump({"machine": fields, **links, "device": devices})

    @classmethod
    def from_toml(cls, text: str) -> "Machine":
        """The machine of a text written by `to_toml`.

        Raises:
            MachineError: the text is not TOML, or a field is missing, unknown or wrong.
        """
        content = toml_of(text, MachineError)
        valid = ("machine", "within", "across", "device")
        for key in content:
            if key not in valid:
                raise MachineError(unknown("table", key, valid))
        if not isinstance(content.get("machine"), Mapping):
            raise MachineError("no [machine] table in this text")
        links = {key: content[key] for key in ("within", "across") if key in content}
        return cls(**{**content["machine"], **links, "devices": content.get("device", ())})

    def save(self, path: str | Path) -> None:
        """Writes `to_toml()` to a file; to "x.html" or "x.csv" what is shown of it."""
        save_value(self, path, self.to_toml)

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each device and link: bytes, bytes/s, seconds, FLOP/s by precision."""
        return as_frame(self)

    @classmethod
    def load(cls, path: str | Path) -> "Machine":
        """Reads a file written by `save`, or by hand.

        Raises:
            MachineError: the text is not a valid machine.
        """
        with about(path, MachineError):
            return cls.from_toml(text_of(path, MachineError))

    def __repr__(self) -> str:
        return headline(self)

    __str__ = __repr__

    def _repr_html_(self) -> Markup:
        return as_html(self)


def headline(machine: "Machine") -> str:
    """The machine in one line."""
    device, count = machine.devices[0], len(machine.devices)
    ranks = "any number of ranks" if count == 1 else f"{count} ranks"
    shapes = sum(len(device.samples) for device in machine.devices)
    known = f"{shapes} measured layer shapes" if shapes else "no measured layer shapes"
    hosts = "" if machine.ranks_per_host is None else f", {machine.ranks_per_host} to a host"
    return f"<Machine {machine.name}: {ranks} on {device.name}{hosts}, {known}>"


def as_frame(machine: "Machine") -> "pandas.DataFrame":
    """The machine's devices and links in plain numbers."""
    precisions = dict.fromkeys(name for device in machine.devices for name in device.flops)
    links = {"within": machine.within, "across": machine.across}
    rows: list[dict[str, Any]] = [
        {
            "part": "device",
            "rank": None if len(machine.devices) == 1 else rank,
            "name": device.name,
            "memory_bytes": device.memory_bytes,
            "bandwidth": device.bandwidth,
            **{f"flops_{name}": device.flops.get(name) for name in precisions},
            "layer_shapes": len(device.samples),
            "workspaces": len(device.workspaces),
            "source": device.source,
        }
        for rank, device in enumerate(machine.devices)
    ]
    rows += [
        {
            "part": name,
            "name": link.name,
            "bandwidth": link.bandwidth,
            "latency_s": link.latency_s,
            "reduction_s_per_byte": link.reduction_s_per_byte,
            "source": link.source,
        }
        for name, link in links.items()
        if link is not None
    ]
    return frame_of(rows, list(dict.fromkeys(name for row in rows for name in row)))


def as_html(machine: "Machine") -> Markup:
    """The machine's devices and links as HTML."""
    one = len(machine.devices) == 1
    devices = [
        ("all" if one else str(rank), *_device(device))
        for rank, device in enumerate(machine.devices)
    ]
    links = [link for link in (machine.within, machine.across) if link is not None]
    slowed = (
        f"A rank computes {machine.slowdown:.3g} times as long while a collective of its own "
        f"goes on.{_unequal(machine)}"
    )
    return element(
        "div",
        element("p", headline(machine)),
        table(_DEVICES, devices),
        table(_LINKS, map(_link, links)),
        element("p", slowed),
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
        str(len(device.workspaces)),
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
    """A rate as text: 3.35e12 B/s is "3.35 TB/s"."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
