"""Groups: ranks that communicate, and the order of their collectives."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.comm.algorithms.exchange import Piece
from workbench.comm.algorithms.hierarchical import Hosts
from workbench.comm.groups.phases import Mark, PhaseLog, unheard
from workbench.comm.groups.record import Doing, Key, Listener, Phase, Recorder
from workbench.comm.groups.watch import Watch, Work
from workbench.comm.pieces import even
from workbench.comm.shared_memory.buffer import SharedBuffer, allocate
from workbench.comm.shared_memory.staging import Staging
from workbench.comm.transit import Waiters
from workbench.plan.all_reduce import Algorithm, chosen
from workbench.plan.codec import Codec
from workbench.plan.phases import CollectiveTrace

_SILENT = nullcontext()


@dataclass(frozen=True)
class Link:
    """What a group of two or more ranks communicates through.

    Attributes:
        process_group: torch's communicator.
        device: where tensors must lie to travel: the GPU under nccl, the host under gloo.
        watch: waits for works.
        waiters: wait for messages.
        hosts: the group's ranks, as indices, by the memory that they share; a rank that shares
            none is a host of its own.
        local: the memory that this rank shares with the others of its host, if there are any.
        buffers: those that `Group.buffer` made, by the address of their memory.
    """

    process_group: dist.ProcessGroup
    device: torch.device
    watch: Watch
    waiters: Waiters
    hosts: Hosts
    local: Staging | None = None
    buffers: WeakValueDictionary[int, SharedBuffer] = field(default_factory=WeakValueDictionary)

    @property
    def staging(self) -> Staging | None:
        """The memory that all ranks share, where they do; it goes before the communicator."""
        return self.local if len(self.hosts) == 1 else None

    def begin(self, work: Work) -> Work:
        """Takes note of `work`, which is under way from now on."""
        if self.device.type == "cpu":
            self.watch.begin(work)
        return work

    def send_and_receive(self, sends: Sequence[Piece], receives: Sequence[Piece], tag: int) -> Work:
        """Starts messages, one or more; they are one work."""
        group = self.process_group
        if self.device.type != "cpu":  # nccl makes one work of them, and knows no tags
            messages = [dist.P2POp(dist.irecv, x, None, group, tag, rank) for rank, x in receives]
            messages += [dist.P2POp(dist.isend, x, None, group, tag, rank) for rank, x in sends]
            return dist.batch_isend_irecv(messages)[0]
        works = [group.recv([x], rank, tag) for rank, x in receives]
        works += [group.send([x], rank, tag) for rank, x in sends]
        return self.begin(self.waiters.begin(works))

    def beside(self, rank: int) -> Sequence[int]:
        """The ranks that share memory with this one, itself included; indices in the group."""
        return next(members for members in self.hosts if rank in members)

    def is_done(self, work: Work) -> bool:
        """Whether to wait for `work` holds up nobody."""
        return self.device.type != "cpu" or work.is_completed()

    def wait(self, works: Sequence[Work], call: "Call") -> None:
        """Returns when `works`, parts of `call`, are done."""
        if self.device.type == "cpu":
            self.watch.wait(works, call.group.ranks, str(call))
        else:
            for work in works:
                work.wait()  # orders the GPU's stream behind the work, and holds up no host


class Group:
    """Ranks that communicate, with a communicator of their own.

    A group of one rank has no communicator: nothing travels, every collective is a copy.

    Args:
        purpose: what the group is for ("shard", "replica", ...).
        ranks: the global ranks, in the order of their pieces.
        rank: this rank's index in `ranks`.
        recorder: counts what is communicated.
        link: the communicator; None if and only if the group has one rank.
    """

    def __init__(
        self,
        purpose: str,
        ranks: tuple[int, ...],
        rank: int,
        recorder: Recorder,
        link: Link | None = None,
    ) -> None:
        if (link is None) != (len(ranks) == 1):
            raise ValueError(f"{len(ranks)} ranks {'without' if link is None else 'with'} a link")
        self.name = f"{purpose}({','.join(map(str, ranks))})"
        self.ranks, self.rank = ranks, rank
        self.recorder, self.link = recorder, link
        self._calls = 0

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def staging(self) -> Staging | None:
        """The memory that the ranks share; None where they do not, or there is but one."""
        return None if self.link is None else self.link.staging

    def chosen(
        self, algorithm: Algorithm, nbytes: int, *, beside: bool, codec: Codec | None = None
    ) -> Algorithm:
        """What this group does for `algorithm`; see `workbench.plan.all_reduce.chosen`."""
        hosts = [1] if self.link is None else [len(members) for members in self.link.hosts]
        gloo = self.link is None or self.link.device.type == "cpu"
        backend, named = "gloo" if gloo else "nccl", "" if codec is None else codec.name
        return chosen(algorithm, hosts, backend, nbytes, beside=beside, codec=named)

    @property
    def transport(self) -> str:
        """What tensors travel through, for people to read."""
        if self.link is None:
            return "nothing"
        if self.link.staging is not None:
            return "shared memory"
        if len(self.link.hosts) < self.size:
            return "shared memory within hosts, gloo across"
        return "gloo" if self.link.device.type == "cpu" else "nccl"

    def buffer(self, numel: int, like: Tensor, segments: Sequence[int] | None = None) -> Tensor:
        """Makes a flat buffer of zeros that `start_all_reduce` sums without a copy.

        It lies in memory that the ranks of a host share, and is an ordinary tensor where there is
        but one. All ranks of the group call this, in one order and with one size. Torch's
        allocator does not see shared memory; of a group of k it is the buffer and a k-th more.

        Args:
            numel: its elements.
            like: has its dtype and device.
            segments: elements that each rank of the group adds up; it is then shared by all of
                them or an ordinary tensor. None: near-equal ones of the ranks of each host.

        Raises:
            CommError: not all ranks came.
        """
        local = None if self.link is None else self.link.local
        if segments is not None:
            local = self.staging
        if self.link is not None and local is not None and numel > 0:
            what = f"a shared buffer of {numel} elements for group {self.name}"
            own = even(numel, local.size) if segments is None else segments
            made = allocate(local, own, like.dtype, what)
            if made is not None:
                flat, self.link.buffers[made[0].data_ptr()] = made
                return flat
        return like.new_zeros(numel)

    def shared(self, flat: Tensor) -> SharedBuffer | None:
        """What is behind a tensor that `buffer` made; None behind any other."""
        buffer = None if self.link is None else self.link.buffers.get(flat.data_ptr())
        return buffer if buffer is not None and buffer.nbytes == flat.nbytes else None

    def __repr__(self) -> str:
        return f"<Group {self.name}, rank {self.rank} of {self.size}>"

    def call(self, op: str, layer: str, phase: Phase) -> "Call":
        """Takes the next place in the group's order of collectives."""
        self._calls += 1
        return Call(self, self._calls, Key(self.name, op, layer, phase))


class Call:
    """One collective of a group: its name in the record and in errors.

    Attributes:
        mark: hears of the phases, if they are traced.
    """

    def __init__(self, group: Group, number: int, key: Key) -> None:
        self.group, self.key, self.number = group, key, number
        group.recorder.add(key, calls=1)
        self._traces = group.recorder.traces if key.op == "all_reduce" else None
        self._log = None if self._traces is None else PhaseLog()
        self.mark: Mark = unheard if self._log is None else self._log.mark
        if group.recorder.listener is not None:
            group.recorder.listener.begun(self)

    def __str__(self) -> str:
        label = f" of layer {self.key.layer!r}" if self.key.layer else ""
        return f"{self.key.op}{label} (call {self.number} of group {self.key.group})"

    def conclude(self) -> None:
        """Says that all is done; with this a trace of it ends."""
        if self._log is not None and self._traces is not None:
            rank, key = self.group.ranks[self.group.rank], self.key
            named = (rank, key.group, key.op, key.layer, self.number)
            self._traces.append(CollectiveTrace(*named, *self._log.close()))
            self._log = None

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Records the time in the body as blocked in this collective."""
        began = time.perf_counter()
        try:
            with self.told("blocked"):
                yield
        finally:
            self.group.recorder.add(self.key, seconds=time.perf_counter() - began)

    def told(self, doing: Doing) -> AbstractContextManager[None]:
        """Tells the recorder's listener, if there is one, that the thread is in the body."""
        listener = self.group.recorder.listener
        return _SILENT if listener is None else self._telling(listener, doing)

    @contextmanager
    def _telling(self, listener: Listener, doing: Doing) -> Iterator[None]:
        listener.entered(self, doing)
        try:
            yield
        finally:
            listener.left(self, doing)

    def count(self, sizes: Sequence[int], itemsize: int, *, adds: bool = False) -> None:
        """Records one exchange in which rank r of the group sends `sizes[r]` elements here.

        Args:
            sizes: of all ranks.
            itemsize: of an element, in bytes.
            adds: whether this rank adds up what comes.
        """
        others = [(r, n) for r, n in enumerate(sizes) if r != self.group.rank]
        self.count_round([(r, n * itemsize) for r, n in others], sum(n for _, n in others) * adds)

    def count_two_rounds(self, length: int, itemsize: int, members: Sequence[int]) -> None:
        """Records a reduce-scatter and an all-gather of near-equal segments.

        Args:
            length: of all segments together, in elements.
            itemsize: of an element, in bytes.
            members: who takes part, as indices in the group, in the order of their segments.
        """
        own = self.group.rank
        sizes = dict(zip(members, even(length, len(members)), strict=True))
        others = [rank for rank in members if rank != own]
        self.count_round([(r, sizes[own] * itemsize) for r in others], len(others) * sizes[own])
        self.count_round([(r, sizes[r] * itemsize) for r in others])

    def count_round(self, pieces: Sequence[tuple[int, int]], additions: int = 0) -> None:
        """Records one exchange in which this rank receives pieces from others.

        Args:
            pieces: whose each is, as an index in the group, and its bytes.
            additions: elements of what comes that are then added up.
        """
        recorder, ranks = self.group.recorder, self.group.ranks
        received = [(ranks[giver], size) for giver, size in pieces if size > 0]
        whole = sum(size for _, size in received)
        recorder.add(self.key, rounds=1, messages=len(received), bytes=whole, additions=additions)
        if recorder.givers is not None:
            recorder.givers.add(self.key, received)
        if recorder.listener is not None:
            recorder.listener.received(self, whole)
