"""Torch's own all-reduce, on threads of its own."""

import torch.distributed as dist
from torch import Tensor

from workbench.comm.groups.group import Call, Link
from workbench.comm.groups.watch import Work


class Background:
    """Sums `flat` in place; what gloo or nccl then do goes on by itself.

    They do not tell what they send: what is recorded are two rounds of near-equal segments, which
    is what both move where bandwidth counts, though in more messages; in a trace, all is "wait".

    Args:
        flat: contiguous, where the communicator wants it, of a type to sum in.
        link: of the group.
        call: what it is part of.
    """

    def __init__(self, flat: Tensor, link: Link, call: Call) -> None:
        group = call.group
        call.count_two_rounds(len(flat), flat.itemsize, range(group.size))
        call.mark("send")
        work = dist.all_reduce(flat, group=link.process_group, async_op=True)
        self._link, self._call = link, call
        call.mark("wait")
        self._work: Work | None = link.begin(work)

    def advance(self) -> bool:
        """Whether it is done."""
        if self._work is not None and self._link.is_done(self._work):
            self.wait()
        return self._work is None

    def wait(self) -> None:
        """Returns when it is done."""
        if self._work is not None:
            self._link.wait([self._work], self._call)
            self._work = None
