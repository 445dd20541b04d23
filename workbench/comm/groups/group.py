"""Groups: ranks that communicate, and the order of their collectives."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.comm.messages.flat import HostGroups, Message, even
from workbench.comm.messages.recorder import (
    Doing,
    PhaseLog,
    PhaseMark,
    Recorder,
    RecordKey,
    RecordListener,
    StepPhase,
    unheard,
)
from workbench.comm.messages.waiting import AsyncWork, MessageWork, PeerWatch, Waiters
from workbench.comm.shared_memory.meeting import SharedBuffer, Staging, allocate
from workbench.plan.collective.algorithm import Algorithm, chosen
from workbench.plan.collective.codec import AnyCodec
from workbench.plan.experiment.metrics import CollectiveTrace

_SILENT = nullcontext()


@dataclass(eq=False)
class GroupLink:
    """What a group of two or more ranks communicates through.

    Attributes:
        watch: what waits for works, and names who does not come.
        hosts: the group's ranks, as indices, by the memory that they share; a rank that shares
            none is a host of its own.
        local: the memory that this rank shares with the others of its host, if there are any.
    """

    process_group: dist.ProcessGroup
    device: torch.device
    watch: PeerWatch
    waiters: Waiters
    hosts: HostGroups
    local: Staging | None = None
    buffers: WeakValueDictionary[int, SharedBuffer] = field(default_factory=WeakValueDictionary)

    @property
    def staging(self) -> Staging | None:
        """The memory that all ranks share, where they do; it goes before the communicator."""
        return self.local if len(self.hosts) == 1 else None

    def close(self) -> None:
        """Lets the communicator go, whose threads wake a hundred times a second until then.

        Whoever still has the group, in a cycle perhaps, does not keep them.
        """
        del self.process_group

    def begin(self, work: AsyncWork) -> AsyncWork:
        """Takes note of `work`, which is under way from now on, and returns it."""
        if self.device.type == "cpu":
            self.watch.begin(work)
        return work

    def send_and_receive(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> AsyncWork:
        """Starts one message or more; returns one work that is done when all of them are.

        Args:
            tag: the number by which the receiver tells these messages from others.
        """
        group = self.process_group
        if self.device.type != "cpu":  # nccl makes one work of them, and knows no tags
            messages = [dist.P2POp(dist.irecv, x, None, group, tag, rank) for rank, x in receives]
            messages += [dist.P2POp(dist.isend, x, None, group, tag, rank) for rank, x in sends]
            return dist.batch_isend_irecv(messages)[0]
        works: list[dist.Work] = []
        try:
            works += [group.recv([x], rank, tag) for rank, x in receives]
            works += [group.send([x], rank, tag) for rank, x in sends]
        except RuntimeError as error:  # whoever waits for it says in which collective
            return self.begin(MessageWork.broken(works, error))
        return self.begin(self.waiters.begin(works))

    def beside(self, rank: int) -> Sequence[int]:
        """Returns the ranks that share memory with `rank`, itself included; as group indices."""
        return next(members for members in self.hosts if rank in members)

    def is_done(self, work: AsyncWork) -> bool:
        """Returns whether to wait for `work` holds up nobody."""
        return self.device.type != "cpu" or work.is_completed()

    def wait(self, works: Sequence[AsyncWork], call: "GroupCall") -> None:
        """Returns when `works`, parts of `call`, are done.

        Raises:
            CommTimeout: other ranks did not come; it names them.
            PeerLost: a connection broke, or a rank has given up.
        """
        if self.device.type == "cpu":
            self.watch.wait(works, call.group.ranks, str(call))
        else:
            for work in works:
                work.wait()  # orders the GPU's stream behind the work, and holds up no host


class Group:
    """Ranks that communicate, with a communicator of their own.

    A group of one rank has no communicator: nothing travels, every collective is a copy.

    Args:
        purpose: the purpose of the group ("shard", "replica", ...).
        ranks: the global ranks, in the order of their pieces.
        rank: this rank's index in `ranks`.
        recorder: what counts what is communicated.
        link: the connection of the ranks; None if and only if the group has one rank.

    Attributes:
        name: the purpose and the global ranks, "shard(0,1)".

    Raises:
        ValueError: a group of one rank has a link, or one of several has none.
    """

    def __init__(
        self,
        purpose: str,
        ranks: tuple[int, ...],
        rank: int,
        recorder: Recorder,
        link: GroupLink | None = None,
    ) -> None:
        if (link is None) != (len(ranks) == 1):
            raise ValueError(
                f"a group has a link if it has two ranks or more, got ranks {ranks} of {purpose!r} "
                f"{'without' if link is None else 'with'} one"
            )
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

    def staging_on(self, device: torch.device) -> Staging | None:
        """Returns the memory that all ranks share where it is this device's; else None."""
        staging = self.staging
        return staging if staging is not None and staging.device == device else None

    def chosen(
        self, algorithm: Algorithm, x: Tensor, *, beside: bool, codec: AnyCodec | None = None
    ) -> Algorithm:
        """Returns the algorithm that stands for `algorithm` in this group.

        Args:
            algorithm: the algorithm that was asked for, perhaps "auto".
            x: the summand of this rank.
            beside: whether it lies in a rank's own memory, and is summed while the rank computes.
            codec: the codec that it goes through; None: there is none.

        Raises:
            ValueError: there is no such algorithm, or it cannot take the codec.
        """
        hosts = [1] if self.link is None else [len(members) for members in self.link.hosts]
        gloo = self.link is None or self.link.device.type == "cpu"
        backend, named = "gloo" if gloo else "nccl", "" if codec is None else codec.name
        name = chosen(algorithm, hosts, backend, x.nbytes, beside=beside, codec=named)
        shared = None if self.link is None else self.link.local
        elsewhere = shared is not None and shared.device != x.device
        return "direct" if name == "hierarchical" and elsewhere else name

    @property
    def transport(self) -> str:
        """What tensors travel through, for people to read."""
        if self.link is None:
            return "nothing"
        if self.link.staging is not None:
            on_gpu = self.link.staging.memory is not None
            return "memory of the GPU" if on_gpu else "shared memory"
        if len(self.link.hosts) < self.size:
            return "shared memory within hosts, gloo across"
        return "gloo" if self.link.device.type == "cpu" else "nccl"

    def buffer(self, numel: int, like: Tensor, segments: Sequence[int] | None = None) -> Tensor:
        """Makes a flat buffer of zeros that `start_all_reduce` sums without a copy.

        It lies in memory that the ranks of a host share, and is an ordinary tensor where there is
        but one. All ranks of the group call this, in one order and with one size. Torch's
        allocator does not see shared memory; of a group of k it is the buffer and a k-th more.

        Args:
            numel: the number of elements.
            like: a tensor with the buffer's dtype and device.
            segments: the elements that each rank of the group adds up; the buffer is then shared
                by all of them or an ordinary tensor. None: near-equal segments for the ranks of
                each host.

        Returns:
            The buffer [numel].

        Raises:
            CommError: not all ranks came.
        """
        local = None if self.link is None else self.link.local
        if segments is not None:
            local = self.staging
        there = local is not None and local.device == like.device
        if self.link is not None and local is not None and there and numel > 0:
            what = f"a shared buffer of {numel} elements for group {self.name}"
            own = even(numel, local.size) if segments is None else segments
            made = allocate(local, own, like.dtype, what)
            if made is not None:
                flat, self.link.buffers[made[0].data_ptr()] = made
                return flat
        return like.new_zeros(numel)

    def shared(self, flat: Tensor) -> SharedBuffer | None:
        """Returns the shared buffer behind a tensor that `buffer` made; None behind any other."""
        buffer = None if self.link is None else self.link.buffers.get(flat.data_ptr())
        return buffer if buffer is not None and buffer.nbytes == flat.nbytes else None

    def __repr__(self) -> str:
        return f"<Group {self.name}, rank {self.rank} of {self.size}>"

    def call(self, op: str, layer: str, phase: StepPhase) -> "GroupCall":
        """Takes the next place in the group's order of collectives.

        Args:
            op: the collective's name in the record, "all_gather".
            layer: the layer under which it is recorded.
            phase: the phase of the step under which it is recorded.
        """
        self._calls += 1
        return GroupCall(self, self._calls, RecordKey(self.name, op, layer, phase))


class GroupCall:
    """One collective of a group: its name in the record and in errors.

    Args:
        number: its place in the group's order of collectives, from 1 on.
    """

    def __init__(self, group: Group, number: int, key: RecordKey) -> None:
        self.group, self.key, self.number = group, key, number
        group.recorder.add(key, calls=1)
        self._traces = group.recorder.traces if key.op == "all_reduce" else None
        self._log = None if self._traces is None else PhaseLog()
        self.mark: PhaseMark = unheard if self._log is None else self._log.mark
        if group.recorder.listener is not None:
            group.recorder.listener.begun(self)

    def __str__(self) -> str:
        label = f" of layer {self.key.layer!r}" if self.key.layer else ""
        return f"{self.key.op}{label} (call {self.number} of group {self.key.group})"

    def conclude(self) -> None:
        """Ends the trace of this call, if there is one: all is done."""
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
    def _telling(self, listener: RecordListener, doing: Doing) -> Iterator[None]:
        listener.entered(self, doing)
        try:
            yield
        finally:
            listener.left(self, doing)

    def count(self, sizes: Sequence[int], itemsize: int, *, adds: bool = False) -> None:
        """Records one exchange in which this rank receives from all others."""
        others = [(r, n) for r, n in enumerate(sizes) if r != self.group.rank]
        self.count_round([(r, n * itemsize) for r, n in others], sum(n for _, n in others) * adds)

    def count_two_rounds(self, length: int, itemsize: int, members: Sequence[int]) -> None:
        """Records a reduce-scatter and an all-gather of near-equal segments.

        Args:
            members: the ranks that take part, as indices in the group, in the order of their
                segments.
        """
        own = self.group.rank
        sizes = dict(zip(members, even(length, len(members)), strict=True))
        others = [rank for rank in members if rank != own]
        self.count_round([(r, sizes[own] * itemsize) for r in others], len(others) * sizes[own])
        self.count_round([(r, sizes[r] * itemsize) for r in others])

    def count_round(self, pieces: Sequence[tuple[int, int]], additions: int = 0) -> None:
        """Records one exchange in which this rank receives pieces from others."""
        recorder, ranks = self.group.recorder, self.group.ranks
        received = [(ranks[sender], size) for sender, size in pieces if size > 0]
        whole = sum(size for _, size in received)
        recorder.add(self.key, rounds=1, messages=len(received), bytes=whole, additions=additions)
        if recorder.by_sender is not None:
            recorder.by_sender.add(self.key, received)
        if recorder.listener is not None:
            recorder.listener.received(self, whole)
