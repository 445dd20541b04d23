"""The world of one rank: from its configuration to its groups, and out again whatever happened."""

import ctypes
import hmac
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from workbench.comm.groups.group import Group, GroupLink
from workbench.comm.groups.host import HostMemory
from workbench.comm.messages.errors import CommError
from workbench.comm.messages.recorder import Recorder
from workbench.comm.messages.waiting import AsyncWork, Excuse, PeerWatch, Waiters
from workbench.comm.shared_memory.gpu_memory import memory_of
from workbench.comm.shared_memory.meeting import SEGMENT_BYTES, SharedBuffer
from workbench.plan.placement.placement import RankConfig as RankConfig

# Open files, where the system states no limit: it has one all the same.
_MANY_FILES = 2**16
_LOOK_EVERY_S = 1.0
# Of a collective of torch's: we say ourselves for whom it waits in vain, and who may be waited for.
_LONGEST = timedelta(minutes=10)
_AT_ONCE, _AGAIN_S = timedelta(seconds=2), 0.2  # to be connected


_HASH, _MAC_DIGITS = "sha256", 64


class SealedStore(Store):
    """A store whose notes nobody else has written: each is under a MAC, with its key.

    The store in which ranks meet is open to all users of its host. Its notes say where a rank
    listens and which memory it shares: who could write them would have ranks connect to himself.

    Counters (`add`) are numbers, and have none: who changes them can keep a world from opening, and
    lead no rank elsewhere. gloo calls this object from C++, and does not keep it: its owner does.

    Args:
        store: where the notes lie.
        secret: the text that the ranks of this world know, and nobody else.
    """

    def __init__(self, store: Store, secret: str) -> None:
        super().__init__()
        self.inner, self._secret = store, secret.encode()

    def set(self, key: str, value: str | bytes) -> None:
        """Leaves a note."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self.inner.set(key, self._mac(key, content) + content)  # type: ignore[arg-type]  # or bytes

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Leaves a note where there is none; `expected` is "". Returns the note that is there.

        Raises:
            ValueError: another note is expected: sealed ones are not compared.
            CommError: somebody else has written the note.
        """
        if expected:
            raise ValueError(f"a sealed note is left where there is none, not after {expected!r}")
        sealed = self._mac(key, desired.encode()).decode() + desired
        return self._opened(key, self.inner.compare_set(key, "", sealed))

    def get(self, key: str) -> bytes:
        """Waits for a note.

        Raises:
            CommError: somebody else has written it.
        """
        return self._opened(key, self.inner.get(key))

    def _opened(self, key: str, found: bytes) -> bytes:
        mac, content = found[:_MAC_DIGITS], found[_MAC_DIGITS:]
        if not hmac.compare_digest(mac, self._mac(key, content)):
            raise CommError(
                f"the note {key!r}, by which ranks find each other, was written by somebody who is "
                "no rank of this world"
            )
        return content

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter."""
        return int(self.inner.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        """Whether all of these are there."""
        return bool(self.inner.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for all of these; no longer than for any note, whatever the timeout is.

        Groups connect through here, which have the timeout of their collectives.
        """
        longest = self.timeout
        self.inner.wait(keys, longest if timeout is None else min(timeout, longest))

    def delete_key(self, key: str) -> bool:
        """Removes a note."""
        return bool(self.inner.delete_key(key))

    def num_keys(self) -> int:
        """How many notes there are."""
        return int(self.inner.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long is waited for a note."""
        self.inner.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """How long is waited for a note."""
        return self.inner.timeout  # type: ignore[attr-defined]  # stubs lack it

    def _mac(self, key: str, content: bytes) -> bytes:
        named = len(key).to_bytes(4, "big") + key.encode() + content
        return hmac.new(self._secret, named, _HASH).hexdigest().encode()


class World:
    """All ranks, seen from one of them.

    Args:
        config: what this rank has to know to find the others.
        store: the store in which the ranks of this world meet.
        renew: is called again and again while this rank is excused.

    Attributes:
        rank: the global rank.
        size: the number of ranks.
        device: the device on which this rank computes.
        recorder: what counts what this rank's groups communicate.
        store: a store of small notes that all ranks of this world can read.
    """

    def __init__(
        self, config: RankConfig, store: SealedStore, renew: Callable[[], object] = lambda: None
    ) -> None:
        self.rank, self.size = config.rank, config.world_size
        self.device = torch.device(config.device)
        self.recorder, self.store = Recorder(), store
        self._excuse = Excuse(store, config.rank, renew)
        self._watch = PeerWatch(store, config.rank, config.world_size, config.timeout_s)
        self._times_grouped = self._times_closed = 0
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        backend = backend_of(self._watch.meet("the world to open", _device_name(self.device)))
        self._travel_device = self.device if backend == "nccl" else torch.device("cpu")
        try:
            dist.init_process_group(
                backend,
                # NCCL reads its notes also from threads of its own, which Python may not outlive.
                store=store.inner if backend == "nccl" else store,
                rank=self.rank,
                world_size=self.size,
                timeout=_LONGEST,
            )
        except BaseException:
            # Groups are named by a count, which must be the same on all ranks; torch takes it
            # back when it destroys the world, but not when it could not make it.
            dist.distributed_c10d._world.group_count = 0
            raise
        self._process_groups = [dist.group.WORLD]
        self._links: list[GroupLink] = []
        shares = config.shared_memory and backend == "gloo"
        memory = memory_of(self.device) if shares else None
        self._host = HostMemory(self._watch, shares, config.host, memory)
        self._waiters = Waiters()

    @classmethod
    @contextmanager
    def open(
        cls, config: RankConfig, renew: Callable[[], object] = lambda: None
    ) -> Iterator["World"]:
        """Joins the other ranks; on leaving, closes at once, even after a failure.

        Args:
            config: what this rank has to know to find the others.
            renew: is called again and again while this rank is excused; see `excused`.

        Raises:
            CommError: the store in which the ranks meet is gone, or cannot be reached.
            CommTimeout: not all ranks came; it names those that did not.
            PeerLost: another rank has given up.
        """
        torch.set_num_threads(config.threads)
        _raise_file_limit()
        if dist.is_initialized():
            _keep(dist.distributed_c10d._world.pg_map)  # an interrupt kept it from being closed
            dist.destroy_process_group()
        if config.address in ("localhost", "127.0.0.1"):
            # gloo would look up the host's own name, which need not resolve to anything.
            loopback = "lo0" if sys.platform == "darwin" else "lo"
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        world = cls(
            config,
            SealedStore(PrefixStore(config.prefix, _meeting_place(config)), config.secret),
            renew,
        )
        try:
            # Whoever left while others were still connecting would make their connecting fail.
            world._watch.meet("all to be connected", "")
            yield world
        except BaseException as error:
            world._watch.give_up(error)
            raise
        finally:
            with _uninterrupted():
                world._close()

    def groups(
        self, specs: Sequence[tuple[str, tuple[int, ...]]]
    ) -> dict[tuple[str, tuple[int, ...]], Group]:
        """Creates groups; every rank calls this with the same specs, in the same order.

        Args:
            specs: (purpose, global ranks) of each group. The same ranks under two purposes are two
                communicators, whose collectives may overlap.

        Returns:
            The groups that this rank belongs to, by their specs.

        Raises:
            ValueError: two specs are equal; ranks are empty, repeated or not of this world; or
                another rank asks for other groups.
            CommTimeout: not all ranks came; it names those that did not.
            PeerLost: another rank has given up.
        """
        if len(set(specs)) < len(specs):
            raise ValueError(f"every group can be asked for once, got {list(specs)}")
        for purpose, ranks in specs:
            if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size)):
                raise ValueError(
                    f"group {purpose!r} needs one or more different ranks of "
                    f"0..{self.size - 1}, got {ranks}"
                )
        self._times_grouped += 1
        own = repr(list(specs))
        asked = self._watch.meet(f"groups to be made (call {self._times_grouped})", own)
        for other, theirs in enumerate(asked):
            if theirs != own:
                raise ValueError(f"rank {self.rank} wants {own}, rank {other} {theirs}")
        process_groups = {spec: self._connect(spec[1]) for spec in specs if len(spec[1]) > 1}
        occasion = f"groups to be connected (call {self._times_grouped})"
        shared = self._host.share(occasion, [ranks for _, ranks in specs])
        links = {
            spec: GroupLink(
                process_groups[spec],
                self._travel_device,
                self._watch,
                self._waiters,
                shared[index].hosts,
                shared[index].staging,
            )
            for index, spec in enumerate(specs)
            if index in shared
        }
        self._links += links.values()
        return {
            (purpose, ranks): Group(
                purpose, ranks, ranks.index(self.rank), self.recorder, links.get((purpose, ranks))
            )
            for purpose, ranks in specs
            if self.rank in ranks
        }

    def let_go(self, groups: Iterable[Group]) -> None:
        """Closes groups with all their connections; every rank calls it, with its own of them.

        Memory that they share goes with the last buffer in it.

        Args:
            groups: the groups of this world that nobody uses any more.

        Raises:
            CommTimeout: not all ranks came; it names those that did not.
            PeerLost: another rank has given up.
        """
        gone = [group.link for group in groups if group.link is not None]
        self._times_closed += 1
        # Others may still be at their last collective, and would lose this rank in it.
        self._watch.meet(f"groups to be closed (call {self._times_closed})", "")
        self._links = [link for link in self._links if all(link is not other for other in gone)]
        for link in gone:
            if link.local is not None:
                self._host.forget(link.local)
            self._process_groups.remove(link.process_group)
            dist.destroy_process_group(link.process_group)
            link.close()

    def excused(self) -> AbstractContextManager[None]:
        """While this rank waits for a disk, or for data, the others wait for it as long.

        Not for what waits for other ranks. Where torch sums, it waits for ten minutes more at most.
        """
        return self._excuse.during()

    @property
    def shared_bytes(self) -> int:
        """Bytes of this rank's part of shared memory, which torch's allocator does not see."""
        return self.staged_bytes + sum(buffer.nbytes for buffer in self._buffers())

    @property
    def staged_bytes(self) -> int:
        """Bytes of it without the buffers that are tensors of this rank: slots, and their sums."""
        slots = sum(SEGMENT_BYTES for link in self._links if link.local is not None)
        return slots + sum(buffer.held_bytes - buffer.nbytes for buffer in self._buffers())

    def _buffers(self) -> Iterator[SharedBuffer]:
        for link in self._links:
            yield from link.buffers.values()

    def _connect(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        # Every rank creates every group, its own or not. torch's default timeout is half an hour.
        process_group = dist.new_group(_in_order(ranks), timeout=_LONGEST)
        self._process_groups.append(process_group)
        return process_group

    def _close(self) -> None:
        self._excuse.close()
        self._host.leave()
        self._waiters.close()
        unfinished = self._watch.unfinished
        if unfinished:
            _keep_until_done(list(self._process_groups), unfinished)
        self._process_groups.clear()
        for link in self._links:
            link.close()
        dist.destroy_process_group()


class _Placed(int):
    """A rank that sorts by its place among the ranks of its group."""

    place: int

    def __lt__(self, other: int) -> bool:
        return self.place < other.place if isinstance(other, _Placed) else super().__lt__(other)


def _in_order(ranks: Iterable[int]) -> list[int]:
    """Ranks that torch leaves in the order of the pieces.

    It sorts them, which only torch 2.12 and later can be told not to do.
    """
    placed: list[int] = []
    for place, rank in enumerate(ranks):
        one = _Placed(rank)
        one.place = place
        placed.append(one)
    return placed


def backend_of(devices: Sequence[str]) -> Literal["gloo", "nccl"]:
    """Returns what a world communicates through, the same on all of its ranks.

    That is nccl where every rank has a GPU to itself; nccl refuses two ranks on one GPU, and knows
    no other devices. Elsewhere all tensors go through the host, those of GPUs as well.
    """
    return "gloo" if "cpu" in devices or len(set(devices)) < len(devices) else "nccl"


def _keep(process_groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Keeps groups that may still wait for a lost rank, to the end of the process.

    The destructor of a gloo group joins its threads, and those wait until their timeout; `abort`
    does not end them.
    """
    for process_group in process_groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))


def _keep_until_done(
    process_groups: list[dist.ProcessGroup | None], works: Sequence[AsyncWork]
) -> None:
    """Keeps groups while `works` wait for a lost rank, and lets them go then.

    Each has three threads, which wake a hundred times a second. A process that ends earlier ends
    without their destructors.
    """
    _keep(process_groups)

    def let_go() -> None:
        while not all(work.is_completed() for work in works):
            time.sleep(_LOOK_EVERY_S)
        while process_groups:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(process_groups.pop()))

    threading.Thread(target=let_go, name="lost-groups", daemon=True).start()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignores SIGINT: whoever interrupts a rank does so again if it takes long; once is enough."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _meeting_place(config: RankConfig) -> Store:
    """The store in which the ranks meet.

    torch tries on and on where nobody listens any more, and cannot be interrupted then.

    Raises:
        CommError: it is gone, or cannot be reached.
    """
    where, deadline = (config.address, config.port), time.monotonic() + config.timeout_s
    while True:
        try:
            socket.create_connection(where, config.timeout_s).close()
            store = dist.TCPStore(*where, timeout=_AT_ONCE)  # type: ignore[attr-defined]  # public
        except (OSError, dist.DistNetworkError) as error:
            if isinstance(error, ConnectionRefusedError) or time.monotonic() > deadline:
                raise CommError(
                    f"rank {config.rank} does not reach the store in which the ranks meet, at "
                    f"{config.address}:{config.port}: {error}"
                ) from error
            time.sleep(_AGAIN_S)
        else:
            store.set_timeout(_patience(config))
            return store


def _patience(config: RankConfig) -> timedelta:
    """Returns how long torch waits for a note: longer than we do, who can name who is missing."""
    return timedelta(seconds=config.timeout_s + 10.0)


def _device_name(device: torch.device) -> str:
    """Returns a GPU's name, the same for two ranks only if they compute on it; else "cpu"."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


def _raise_file_limit() -> None:
    """Lets this process have as many files open as it may; where that is refused, as before.

    A rank of n is connected to up to n - 1 others in each of its groups, and shells mostly begin
    with a limit of 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else hard
    if soft not in (resource.RLIM_INFINITY, hard) and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
