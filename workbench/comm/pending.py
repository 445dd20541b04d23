"""The all-reduce that runs while its caller computes on."""

from abc import ABC, abstractmethod

import torch.distributed as dist
from torch import Tensor

from workbench.comm.buffer import SharedBuffer
from workbench.comm.group import Call, Group
from workbench.comm.pieces import accumulator, even


class Pending(ABC):
    """An all-reduce under way; its buffer holds the sum once `wait` has returned."""

    @abstractmethod
    def poll(self) -> bool:
        """Does what has become possible, and waits for nothing; whether the sum is there."""

    @abstractmethod
    def wait(self) -> None:
        """Returns when the sum is there; only this time counts as blocked.

        Raises:
            CommError: as for a collective that blocks.
        """


class _Over(Pending):
    """Nothing to do: the group has one rank."""

    def poll(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _InBackground(Pending):
    """Torch's own all-reduce, on threads of its own."""

    def __init__(self, call: Call, flat: Tensor, travelling: Tensor, work: dist.Work) -> None:
        self._call, self._flat, self._travelling = call, flat, travelling
        self._work: dist.Work | None = work

    def poll(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        work, link = self._work, self._call.group.link
        if work is None or link is None:
            return
        with self._call.timed():
            link.wait([work], self._call)
            if self._travelling is not self._flat:
                self._flat.copy_(self._travelling)
        self._work = None


class _InShared(Pending):
    """The sum of shared buffers, which ranks advance whenever they look after it."""

    def __init__(self, call: Call, buffer: SharedBuffer) -> None:
        self._call = call
        self._buffer: SharedBuffer | None = buffer

    def poll(self) -> bool:
        if self._buffer is not None and self._buffer.advance():
            self._buffer = None
        return self._buffer is None

    def wait(self) -> None:
        if self._buffer is None:
            return
        with self._call.timed():
            self._buffer.wait(self._call)
        self._buffer = None


def start_all_reduce(flat: Tensor, group: Group, *, layer: str = "") -> Pending:
    """Starts to sum `flat`, contiguous and one-dimensional, in place over the group.

    The caller computes on, and leaves `flat` alone until it has waited. Any number may be under
    way; all ranks start them in one order. The sum is bitwise equal on all ranks.

    A buffer that `Group.buffer` made is summed by the ranks themselves, in rank order, when they
    `poll` or wait for anything: cores that compute are not taken by threads. For any other tensor
    it is torch's own all-reduce, which runs on threads of its own.

    Raises:
        ValueError: `flat` is not a contiguous one-dimensional tensor.
        RuntimeError: `flat` is a shared buffer whose last sum has not been waited for.
    """
    if flat.ndim != 1 or not flat.is_contiguous():
        shape, stride = tuple(flat.shape), flat.stride()
        raise ValueError(f"needs one contiguous dimension, got shape {shape}, stride {stride}")
    flat = flat.detach()
    call, link = group.call("all_reduce", layer, "step"), group.link
    if link is None:
        return _Over()
    segments, wide = even(len(flat), group.size), accumulator(flat.dtype)
    call.count([segments[group.rank]] * group.size, wide.itemsize)
    call.count(segments, wide.itemsize)
    buffer = group.shared(flat)
    if buffer is not None:
        buffer.start()
        pending = _InShared(call, buffer)
        link.watch.also(pending.poll)
        return pending
    travelling = flat.to(link.device, wide)  # torch would sum in flat's type
    work = dist.all_reduce(travelling, group=link.process_group, async_op=True)
    return _InBackground(call, flat, travelling, link.begin(work))
