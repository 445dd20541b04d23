"""Buffers of which each rank owns a segment: the direct all-reduce, open between its two rounds.

All ranks fill their buffers. The first round leaves each with the sum of its own segment. It
computes what it likes from that, say new weights, and the second round sends the result to all. Of
n elements on k ranks, of which this one owns s, it receives

    to the owners       (k-1) s     and adds up as many; one synchronisation
    from the owners     n - s       one synchronisation

in one message from each other rank that has something, each time. Sums are those of `direct`, bit
by bit, whoever owns what.

Source: Chen et al. 2018, arXiv:1802.02326 (GDRAA; their body was not available to us): the update
between the rounds is our reading; Rajbhandari et al. 2020, arXiv:1910.02054, sec. 5.1, for what is
summed once and moved once.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workbench.comm.algorithms.executor import RoundExecutor
from workbench.comm.algorithms.flat import from_owners, to_owners
from workbench.comm.groups.group import Group, GroupCall, GroupLink
from workbench.comm.messages.flat import MessageRounds, cut
from workbench.comm.pending import Pending


class Owned:
    """A flat buffer and its segments; all ranks of the group make it, in one order and alike.

    One use is: fill `flat`, `start_sum`, wait, fill `outgoing`, `start_hand_out`, wait, and read
    `pieces`, before `flat` is filled again. Where ranks share memory, nothing else is needed.

    Args:
        sizes: the elements of each rank's segment, zero included; they lie one after another.

    Attributes:
        flat: the buffer [sum(sizes)].

    Raises:
        ValueError: there is not one size for each rank, or a negative one.
        CommError: not all ranks came.
    """

    def __init__(self, sizes: Sequence[int], group: Group, like: Tensor) -> None:
        if len(sizes) != group.size or min(sizes) < 0:
            raise ValueError(
                f"segments must be {group.size} sizes >= 0, one for each rank of {group.name}, "
                f"got {tuple(sizes)}"
            )
        self.sizes, self._group = tuple(sizes), group
        self.flat = group.buffer(sum(sizes), like, self.sizes).detach()
        self._buffer = group.shared(self.flat)
        self.is_summed = False

    @property
    def mine(self) -> Tensor:
        """This rank's segment [sizes[rank]] of the buffer: its summand, and once summed the sum."""
        return cut(self.flat, self.sizes)[self._group.rank]

    @property
    def outgoing(self) -> Tensor:
        """The memory [sizes[rank]] for what this rank hands out, once its segment is summed."""
        return self.pieces[self._group.rank]

    @property
    def pieces(self) -> Sequence[Tensor]:
        """What each rank has handed out [its size], in rank order."""
        return cut(self.flat, self.sizes) if self._buffer is None else self._buffer.sums

    @torch.no_grad()
    def start_sum(self, *, layer: str = "") -> Pending:
        """Starts to sum this rank's segment over all ranks; recorded as a reduce-scatter.

        Raises:
            RuntimeError: the last sum has not been handed out, nor given up.
        """
        if self.is_summed:
            raise RuntimeError("what was summed last must be handed out before the next sum starts")
        self.is_summed = True
        call, buffer = self._group.call("reduce_scatter", layer, "step"), self._buffer
        if buffer is None:
            return self._start(to_owners, call)
        call.count([len(self.outgoing)] * self._group.size, self.flat.itemsize, adds=True)
        buffer.start(call, mark=call.mark, holds=True)
        return self._advanced(Pending(call, buffer))

    @torch.no_grad()
    def start_hand_out(self, *, layer: str = "") -> Pending:
        """Starts to hand out what is in `outgoing`; recorded as an all-gather.

        Raises:
            RuntimeError: nothing was summed before.
        """
        if not self.is_summed:
            raise RuntimeError("a segment is handed out once it has been summed")
        self.is_summed = False
        call, buffer = self._group.call("all_gather", layer, "step"), self._buffer
        if buffer is None:
            return self._start(from_owners, call)
        call.count(self.sizes, self.flat.itemsize)
        buffer.hand_out(call)
        return self._advanced(Pending(call, buffer))

    def give_up(self) -> None:
        """Lets go of a sum that nobody uses, if there is one; all ranks of the group call it."""
        if self.is_summed and self._buffer is not None:
            self._buffer.give_up()
        self.is_summed = False

    def _start(self, rounds: Callable[..., MessageRounds], call: GroupCall) -> Pending:
        """Starts one round of messages, where ranks share no memory."""
        link, group = self._group.link, self._group
        if link is None:
            return Pending(call, None)
        travelling = self.flat.to(link.device)
        executor = RoundExecutor(
            rounds(travelling, self.sizes, range(group.size), group.rank), call
        )
        copied_back = None if travelling is self.flat else (self.flat, travelling)
        return self._advanced(Pending(call, executor, copied_back))

    def _advanced(self, pending: Pending) -> Pending:
        """Has `pending` advanced while this rank waits for anything."""
        link: GroupLink | None = self._group.link
        if link is not None:
            link.watch.also(pending.poll)
        return pending
