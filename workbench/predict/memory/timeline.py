"""Tensors as they are made and freed over a step, on all ranks at once.

All ranks make and free tensors in one order, and only their sizes differ: the order is written
once, and the bytes alive on all ranks are one cumulative sum. Of a large world a few ranks
represent all; the others may hold an element less of a bucket's sum, which is split over all ranks.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from workbench.program.rows import Counts, Representatives

Phase = Literal["load", "forward", "loss", "backward", "recompute", "step"]
Category = Literal[
    "weights",
    "gradients",
    "buckets",
    "in_flight",
    "codec",
    "optimizer",
    "staging",
    "data",
    "activations",
    "activation_gradients",
    "workspace",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)


class Moment(NamedTuple):
    """A moment of a step: a phase, and the layer that is at work."""

    phase: Phase
    layer: str = ""

    def __str__(self) -> str:
        return f"{self.phase} of {self.layer}" if self.layer else self.phase


Owner = tuple[Category, str]
"""The category of a tensor, and the layer that it belongs to."""


class MemoryTimeline:
    """The tensors of a step, written from its first moment to its last, and then read.

    A tensor is a number. It is alive from `make` until every holder has dropped it.

    Args:
        world_size: the number of ranks.
        alike: the ranks that represent the others in a large world; sizes may be given for these
            alone. None: every rank is looked at.
    """

    def __init__(self, world_size: int, alike: Representatives | None = None) -> None:
        self.world_size, self.alike = world_size, alike
        self.owners: list[Owner] = []
        self._sizes: list[Counts] = []  # of each tensor; most have one that others have
        self._holders: list[int] = []
        # Tensors that take another's place on some ranks, and those of them whose other is alive.
        self._parts: dict[int, dict[bytes, int]] = {}
        self._waiting: set[int] = set()
        self._events: list[int] = []  # tensors as they are made; ~tensor when it is freed
        self._unsure: dict[int, Counts] = {}  # the most bytes of what is made in these events
        self._moments: list[tuple[int, Phase, str]] = [(0, "load", "")]  # each from its event on

    def at(self, phase: Phase, layer: str = "") -> None:
        """Sets the moment of the events that follow."""
        self._moments.append((len(self._events), phase, layer))

    def make(self, size: Counts, category: Category, layer: str = "") -> int:
        """Makes a tensor of so many bytes on each rank [ranks], held once."""
        tensor = len(self._sizes)  # as `_new`, which a deep model would call some thousand times
        self._sizes.append(size)
        self.owners.append((category, layer))
        self._holders.append(1)
        self._events.append(tensor)
        return tensor

    def reside(self, category: Category, sizes: Mapping[str, Counts]) -> None:
        """Makes tensors that stay to the end, for these layers."""
        for layer, size in sizes.items():
            self._events.append(self._new(size, category, layer))

    def hold(self, tensor: int) -> int:
        """Holds a tensor once more."""
        self._holders[tensor] += 1
        return tensor

    def hold_on(self, tensor: int, ranks: npt.NDArray[np.bool_]) -> int:
        """Holds a tensor on some ranks [ranks] alone, as a part of it, which is to be dropped.

        The part takes the tensor's place there once that is freed.
        """
        parts = self._parts.setdefault(tensor, {})
        part = parts.get(ranks.tobytes(), -1)
        if part in self._waiting:
            return self.hold(part)
        part = parts[ranks.tobytes()] = self._new(self._sizes[tensor] * ranks, *self.owners[tensor])
        self._waiting.add(part)
        return part

    def drop(self, tensor: int) -> None:
        """Drops one hold of a tensor, which is freed with the last one."""
        left = self._holders[tensor] = self._holders[tensor] - 1
        assert left >= 0, self.owners[tensor]
        if left > 0:
            return
        if tensor in self._waiting:
            self._waiting.remove(tensor)
            return
        self._events.append(~tensor)
        for part in self._parts.pop(tensor, {}).values():
            if part in self._waiting:
                self._waiting.remove(part)
                self._events.append(part)

    def alone(self, tensor: int) -> bool:
        """Whether a tensor has a single holder."""
        return self._holders[tensor] == 1

    def pass_by(
        self,
        size: Counts | None,
        category: Category,
        layer: str = "",
        *,
        at_most: Counts | None = None,
    ) -> None:
        """A tensor that is alive only for this moment.

        Args:
            size: the bytes on each rank [ranks]; None: there is no such tensor.
            at_most: the most bytes that it may have, where `size` is not known for sure, and may
                be nothing as well [ranks]; None: it is known.
        """
        if size is not None:
            if at_most is not None:
                self._unsure[len(self._events)] = at_most
            tensor = self._new(size, category, layer)
            self._events += (tensor, ~tensor)

    @property
    def unsure(self) -> tuple[str, ...]:
        """The layers with a tensor whose size is not known for sure."""
        return tuple(dict.fromkeys(self.owners[self._events[event]][1] for event in self._unsure))

    def _new(self, size: Counts, category: Category, layer: str) -> int:
        self._sizes.append(size)
        self.owners.append((category, layer))
        self._holders.append(1)
        return len(self._sizes) - 1

    def peaks(self) -> "tuple[Peak, ...]":
        """The peak of each rank; in a large world, of each representative."""
        events = np.array(self._events)
        signs = np.where(events < 0, -1, 1)
        which = np.where(events < 0, ~events, events)
        ids = list(map(id, self._sizes))
        each = dict(zip(ids, self._sizes, strict=True))
        place = {key: index for index, key in enumerate(each)}
        of_tensors = np.array([place[key] for key in ids])
        sizes = np.array([self._kept(size) for size in each.values()])
        unsure, most = list(self._unsure), self._most(len(sizes[0]))
        found: dict[bytes, Peak] = {}  # ranks that hold the same have the same
        peaks: list[Peak] = []
        for rank, own in enumerate(np.ascontiguousarray(sizes.T)):
            key = own.tobytes() + most[rank].tobytes()
            if key not in found:
                levels = np.cumsum(own[of_tensors[which]] * signs)
                event = int(levels.argmax())
                total = int(levels[event])
                alive = np.bincount(which[: event + 1], signs[: event + 1], len(of_tensors))
                held = self._held(alive.astype(np.int64) * own[of_tensors])
                levels[unsure] -= own[of_tensors[which[unsure]]]
                least = int(levels.max())
                levels[unsure] += most[rank]
                band = least, max(total, int(levels.max()))
                found[key] = Peak(rank, total, self._moment(event), held, band)
            peaks.append(replace(found[key], rank=rank))
        return tuple(peaks)

    def _most(self, ranks: int) -> Counts:
        """The most bytes of every tensor that is not known for sure [ranks, tensors]."""
        sizes = [self._kept(size) for size in self._unsure.values()]
        return np.ascontiguousarray(np.array(sizes, dtype=np.int64).reshape(-1, ranks).T)

    def _kept(self, size: Counts) -> Counts:
        """The sizes of the ranks that represent the world."""
        whole = self.alike is not None and len(size) == self.world_size
        return size[self.alike.ranks] if self.alike is not None and whole else size

    def _moment(self, event: int) -> Moment:
        place = bisect_right(self._moments, event, key=lambda moment: moment[0])
        _, phase, layer = self._moments[place - 1]
        return Moment(phase, layer)

    def _held(self, bytes_of: Counts) -> dict[Owner, int]:
        held: dict[Owner, int] = {}
        some = np.flatnonzero(bytes_of)
        for tensor, size in zip(some.tolist(), bytes_of[some].tolist(), strict=True):
            owner = self.owners[tensor]
            held[owner] = held.get(owner, 0) + size
        return held


@dataclass(frozen=True)
class Peak:
    """The peak of one rank.

    Attributes:
        rank: the rank's number among those that were looked at.
        total: the bytes alive.
        held: bytes of each category and layer that are alive then; they add up to `total`.
        band: the bytes at the peak, if tensors that are not known for sure are not there, and if
            they are as large as they may be.
    """

    rank: int
    total: int
    moment: Moment
    held: dict[Owner, int]
    band: tuple[int, int]
