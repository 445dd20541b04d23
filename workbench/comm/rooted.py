"""Sums to one rank and copies from one, that run while their callers compute on.

All messages of one are under way at the same time, and so are several sums or copies: what the
root's connection can take is the only limit. Of n bytes on p ranks

    reduce       the root receives (p - 1) n, and adds in rank order (half types in fp32)
    broadcast    every other rank receives n, all of which the root sends

in one round each, through torch's communicators, also where ranks share memory.
"""

from collections.abc import Sequence

from torch import Tensor

from workbench.comm.algorithms.course import RoundExecutor
from workbench.comm.algorithms.exchange import Exchange, Rounds
from workbench.comm.algorithms.sums import added, blocks
from workbench.comm.groups.group import Group
from workbench.comm.pending import Pending
from workbench.comm.pieces import cut


def start_reduce(flat: Tensor, root: int, group: Group, *, layer: str = "") -> Pending:
    """Starts to sum `flat`, contiguous and one-dimensional, in place on the rank at index `root`.

    The others leave theirs alone until they have waited, too. All ranks start what they start in
    one order.
    """
    return _start("reduce", flat, root, group, layer)


def start_broadcast(flat: Tensor, root: int, group: Group, *, layer: str = "") -> Pending:
    """Starts to copy `flat` from the rank at index `root` over those of the others, alike."""
    return _start("broadcast", flat, root, group, layer)


def _start(op: str, flat: Tensor, root: int, group: Group, layer: str) -> Pending:
    if not 0 <= root < group.size:
        raise ValueError(f"root must be one of 0..{group.size - 1}, got {root}")
    flat = flat.detach()
    call, link = group.call(op, layer, "step"), group.link
    if link is None:
        return Pending(call, None)
    travelling = flat.to(link.device)
    others = [index for index in range(group.size) if index != root]
    rounds = _reduce if op == "reduce" else _broadcast
    course = RoundExecutor(rounds(travelling, root, others, group.rank), call)
    pending = Pending(call, course, None if travelling is flat else (flat, travelling))
    link.watch.also(pending.poll)
    return pending


def _reduce(flat: Tensor, root: int, others: Sequence[int], me: int) -> Rounds:
    if me != root:
        yield Exchange(sends=((root, flat),))
        return
    arrived = cut(flat.new_empty(len(others) * len(flat)), [len(flat)] * len(others))
    additions = len(others) * len(flat)
    yield Exchange(receives=tuple(zip(others, arrived, strict=True)), additions=additions)
    parts = [*arrived[:root], flat, *arrived[root:]]
    for block in blocks(flat):
        flat[block] = added([part[block] for part in parts])


def _broadcast(flat: Tensor, root: int, others: Sequence[int], me: int) -> Rounds:
    if me == root:
        yield Exchange(sends=tuple((index, flat) for index in others))
    else:
        yield Exchange(receives=((root, flat),))
