"""The machine: devices that compute and links between them, as one value."""

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from workbench.plan import show_machine
from workbench.plan.device import Device
from workbench.plan.errors import MachineError
from workbench.plan.graph import unknown
from workbench.plan.known_machines import KNOWN
from workbench.plan.link import Link
from workbench.plan.text import dump
from workbench.plan.value import MachineValue


class Machine(MachineValue):
    """What an experiment runs on: measured by `cluster.calibrate()`, or known by name.

    Raises:
        MachineError: a field has a wrong type or value; the text names it.
    """

    name: str
    devices: tuple[Device, ...] = Field(min_length=1)
    """One, which every rank of a world of any size has; or one for each rank, so that a plan has
    no more ranks than there are devices, and a smaller one takes the first."""
    within: Link
    """Between ranks of one host."""
    across: Link | None = None
    """Between hosts."""
    ranks_per_host: int | None = Field(default=None, ge=1)
    """None: all ranks are on one host."""
    slowdown: float = Field(default=1.0, ge=1)
    """How much slower a rank computes while a collective of its own is under way."""
    unevenness: float = Field(default=0.0, ge=0)
    """Ranks that have the same to do take unequally long: by this standard deviation, relative to
    the mean, which lasts for a step."""
    jitter_s: float = Field(default=0.0, ge=0)
    """And by this variance, in seconds squared for each second of work, which arises anew."""

    @model_validator(mode="after")
    def _hosts_are_linked(self) -> Self:
        if self.ranks_per_host is not None and self.across is None:
            raise ValueError(
                f"ranks_per_host {self.ranks_per_host} means several hosts, "
                "which need a link `across`"
            )
        return self

    def device(self, rank: int) -> Device:
        """What a rank computes on.

        Raises:
            MachineError: the machine has measured devices, and none of this rank.
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
        """What connects these ranks of the world: `across` as soon as two hosts are among them."""
        if self.across is None or self.ranks_per_host is None:
            return self.within
        first, last = min(ranks), max(ranks)
        same = first // self.ranks_per_host == last // self.ranks_per_host
        return self.within if same else self.across

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """Names of the known machines."""
        return tuple(KNOWN)

    @classmethod
    def preset(cls, name: str) -> "Machine":
        """A known machine, from data sheets.

        Raises:
            MachineError: there is none of this name; the nearest are suggested.
        """
        if name not in KNOWN:
            raise MachineError(unknown("machine", str(name), KNOWN))
        return cls(name=name, **KNOWN[name])

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that change when anything about the machine changes."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]

    def to_toml(self) -> str:
        """The machine as text that a person can read and edit."""
        fields = self.model_dump(exclude_none=True, exclude_defaults=True)
        devices, within = fields.pop("devices"), fields.pop("within")
        across = fields.pop("across", None)
        links = {"within": within} if across is None else {"within": within, "across": across}
        return dump({"machine": fields, **links, "device": devices})

    @classmethod
    def from_toml(cls, text: str) -> "Machine":
        """The inverse of `to_toml`.

        Raises:
            MachineError: the text is no TOML, or a field is missing, unknown or wrong.
        """
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise MachineError(f"not TOML: {error}") from None
        valid = ("machine", "within", "across", "device")
        for key in content:
            if key not in valid:
                raise MachineError(unknown("table", key, valid))
        if not isinstance(content.get("machine"), Mapping):
            raise MachineError("no [machine] table in this text")
        links = {key: content[key] for key in ("within", "across") if key in content}
        return cls(**content["machine"], **links, devices=content.get("device", ()))

    def save(self, path: str | Path) -> None:
        """Writes `to_toml()` to a file."""
        Path(path).write_text(self.to_toml())

    @classmethod
    def load(cls, path: str | Path) -> "Machine":
        """Reads a file written by `save`, or by hand."""
        return cls.from_toml(Path(path).read_text())

    def __repr__(self) -> str:
        return show_machine.headline(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return show_machine.as_html(self)
