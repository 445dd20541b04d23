"""The all-reduce that runs while its caller computes on."""

import torch.distributed as dist
from torch import Tensor

from workbench.comm.group import Call, Group
from workbench.comm.pieces import accumulator
from workbench.plan.placement import apportion


class Pending:
    """An all-reduce under way; its buffer holds the sum once `wait` has returned."""

    def __init__(
        self, call: Call, flat: Tensor, travelling: Tensor, work: dist.Work | None
    ) -> None:
        self._call, self._flat, self._travelling, self._work = call, flat, travelling, work

    def wait(self) -> None:
        """Returns when the sum is there; only this time counts as blocked.

        Raises:
            CommError: as for a collective that blocks.
        """
        work, link = self._work, self._call.group.link
        if work is None or link is None:
            return
        with self._call.timed():
            link.wait([work], self._call)
            if self._travelling is not self._flat:
                self._flat.copy_(self._travelling)
        self._work = None


def start_all_reduce(flat: Tensor, group: Group, *, layer: str = "") -> Pending:
    """Starts to sum `flat`, contiguous and one-dimensional, in place over the group.

    The caller computes on, and leaves `flat` alone until it has waited. Any number may be under
    way; all ranks start them in one order. The sum is bitwise equal on all ranks.

    It is torch's own all-reduce, which runs on threads of its own. Reduce-scatter and all-gather
    on a thread of ours took longer alone and as long beside a computation, and needed a second
    buffer.

    Raises:
        ValueError: `flat` is not a contiguous one-dimensional tensor.
    """
    if flat.ndim != 1 or not flat.is_contiguous():
        shape, stride = tuple(flat.shape), flat.stride()
        raise ValueError(f"needs one contiguous dimension, got shape {shape}, stride {stride}")
    flat = flat.detach()
    call, link = group.call("all_reduce", layer, "step"), group.link
    if link is None:
        return Pending(call, flat, flat, None)
    travelling = flat.to(link.device, accumulator(flat.dtype))  # torch would sum in flat's type
    segments = apportion(len(flat), (1,) * group.size)
    call.count([segments[group.rank]] * group.size, travelling.itemsize)
    call.count(segments, travelling.itemsize)
    work = dist.all_reduce(travelling, group=link.process_group, async_op=True)
    return Pending(call, flat, travelling, link.begin(work))
