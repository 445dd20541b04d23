"""Which ranks of a group share memory: they find out together, and all decide alike."""

import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from workbench.comm.messages.flat import HostGroups
from workbench.comm.messages.waiting import PeerWatch
from workbench.comm.shared_memory.gpu_memory import GpuMemory
from workbench.comm.shared_memory.meeting import SEGMENT_BYTES, SLOT_BYTES, SLOTS, Peers, Staging
from workbench.comm.shared_memory.segment import Futex, Offer, attach, create, this_host


@dataclass(frozen=True)
class _Note:
    """What a rank tells the others before groups are connected.

    Attributes:
        host: the host's name, from `this_host`; "" if the rank shares nothing.
        offers: the segment that it offers to each group; None where it is no member, or had no
            memory.
        slots: the same for memory of its device, as that offers it; "" where slots lie in the
            segment.
    """

    host: str
    pid: int
    cores: tuple[int, ...]
    offers: tuple[Offer | None, ...]
    slots: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> "_Note":
        raw = json.loads(text)
        offers = tuple(None if offer is None else Offer(**offer) for offer in raw["offers"])
        return cls(raw["host"], raw["pid"], tuple(raw["cores"]), offers, tuple(raw["slots"]))


@dataclass(frozen=True)
class SharingGroup:
    """Which ranks of a group share memory.

    Attributes:
        hosts: the group's ranks, as indices, by the memory that they share; a rank that shares
            none is a host of its own.
    """

    hosts: HostGroups
    staging: Staging | None


class HostMemory:
    """The memory that a rank shares with the other ranks of its host, in one world.

    Args:
        watch: what meets the other ranks, and waits for them.
        memory: the memory of this rank's device, where that is what it shares; ranks on another
            device are then on another host. None: it shares that of the host.
    """

    def __init__(
        self, watch: PeerWatch, wanted: bool, name: str, memory: GpuMemory | None = None
    ) -> None:
        self._watch = watch
        self._name, self._futex, self._memory = "", Futex(), memory
        self._stagings: list[Staging] = []
        self._peers = Peers()
        if wanted:
            try:
                self._name = f"{this_host()} {name} {'' if memory is None else memory.name}"
            except OSError:  # not Linux: there gloo is the way
                self._name = ""

    def share(self, occasion: str, groups: Sequence[tuple[int, ...]]) -> dict[int, SharingGroup]:
        """Connects the ranks of each group that are on one host; all ranks call it.

        Returns:
            Which ranks share memory in this rank's groups of two or more, by the group's index.
            Where it should have been possible and was not, a warning says why.

        Raises:
            CommError: not all ranks came.
        """
        trouble: list[str] = []
        offers = self._offers(groups, trouble)
        own = [self._slots(offer) for offer in offers]
        slots = tuple(
            "" if made is None or self._memory is None else self._memory.offer(made) for made in own
        )
        try:
            mine = _Note(self._name, os.getpid(), _cores(), offers, slots)
            noted = self._watch.meet(f"{occasion}: memory", json.dumps(asdict(mine)))
            notes = [_Note.read(note) for note in noted]
            opened = self._opened(groups, notes, own, trouble)
            verdicts = self._watch.meet(occasion, json.dumps([*opened]))
        finally:
            for offer in offers:
                if offer is not None:
                    os.close(offer.fd)
        agreed = [set(json.loads(verdict)) for verdict in verdicts]
        shared = {}
        for index, ranks in enumerate(groups):
            if self._watch.rank in ranks and len(ranks) > 1:
                able = {rank for rank in ranks if index in agreed[rank]}
                hosts = _by_host(ranks, [note.host for note in notes], able)
                alone = (ranks.index(self._watch.rank),) in hosts
                shared[index] = SharingGroup(hosts, None if alone else opened[index])
        self._stagings += [own.staging for own in shared.values() if own.staging is not None]
        if trouble:
            warnings.warn(
                f"rank {self._watch.rank} communicates through gloo, which is slower: "
                f"{'; '.join(trouble)}",
                stacklevel=3,
            )
        return shared

    def leave(self) -> None:
        """Tells whoever still waits that this rank does not come any more."""
        for staging in self._stagings:
            staging.leave()
        self._peers.close()

    def forget(self, staging: Staging) -> None:
        """Lets go of the memory of a group that is used no more."""
        self._stagings = [other for other in self._stagings if other is not staging]

    def _offers(
        self, groups: Sequence[tuple[int, ...]], trouble: list[str]
    ) -> tuple[Offer | None, ...]:
        offers: list[Offer | None] = []
        for ranks in groups:
            offer = None
            if self._name and self._watch.rank in ranks and len(ranks) > 1:
                try:
                    offer = create(SEGMENT_BYTES, reserved=False)
                except OSError as error:
                    trouble.append(f"no shared memory for ranks {ranks}: {error}")
            offers.append(offer)
        return tuple(offers)

    def _slots(self, offer: Offer | None) -> Tensor | None:
        """The memory of the device in which a group finds what this rank stages, if it does."""
        if offer is None or self._memory is None:
            return None
        return self._memory.make(SLOTS * SLOT_BYTES)

    def _opened(
        self,
        groups: Sequence[tuple[int, ...]],
        notes: list[_Note],
        own: list[Tensor | None],
        trouble: list[str],
    ) -> dict[int, Staging]:
        together = {
            rank: note.pid for rank, note in enumerate(notes) if note.host == self._name != ""
        }
        others = {rank: pid for rank, pid in together.items() if rank != self._watch.rank}
        self._peers.meet(others)
        cores = set().union(*(notes[rank].cores for rank in together))
        opened = {}
        for index, ranks in enumerate(groups):
            if self._watch.rank not in ranks:
                continue
            mates = tuple(rank for rank in ranks if rank in together)
            offers = [notes[rank].offers[index] for rank in mates]
            present = [offer for offer in offers if offer is not None]
            if len(mates) < 2 or len(present) < len(mates):
                continue
            if self._memory is not None and len(mates) < len(ranks):
                continue  # what goes to other devices goes through the host
            try:
                segments = [attach(offer) for offer in present]
                slots = self._attached(index, mates, notes, own[index])
            except (OSError, RuntimeError) as error:
                trouble.append(f"memory of ranks {mates} could not be shared: {error}")
                continue
            spins = len(cores) >= len(together)
            opened[index] = Staging(
                mates,
                mates.index(self._watch.rank),
                segments,
                self._peers,
                self._watch,
                self._futex,
                spins,
                self._memory,
                slots,
            )
        return opened

    def _attached(
        self, index: int, mates: tuple[int, ...], notes: list[_Note], own: Tensor | None
    ) -> list[Tensor] | None:
        """What each rank of a group has made by `_slots`; None: slots lie in the host's memory."""
        memory = self._memory
        if memory is None or own is None:
            return None
        others = {rank: notes[rank].slots[index] for rank in mates if rank != self._watch.rank}
        return [memory.attach(others[rank]) if rank in others else own for rank in mates]


def _by_host(ranks: tuple[int, ...], names: Sequence[str], able: set[int]) -> HostGroups:
    """Returns the group's ranks, as indices, by host, in the order of each host's first.

    Args:
        able: the global ranks that could open all segments; those of a host stay together only if
            all of them could.
    """
    together: dict[str, list[int]] = {}
    for index, rank in enumerate(ranks):
        together.setdefault(names[rank], []).append(index)
    hosts: list[tuple[int, ...]] = []
    for members in together.values():
        if len(members) > 1 and all(ranks[index] in able for index in members):
            hosts.append(tuple(members))
        else:
            hosts += [(index,) for index in members]
    return tuple(hosts)


def _cores() -> tuple[int, ...]:
    """Returns the logical cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))
