"""The movements that collectives are made of, on flat buffers.

Pieces may have any lengths, are received straight into place, and are counted. Tensors on a GPU
travel through the host where the communicator wants them there.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from workbench.comm.algorithms.exchange import Exchange
from workbench.comm.groups.group import Call
from workbench.comm.groups.watch import Work
from workbench.comm.pieces import cut

# All of one call's courses have tags of their own.
MOST_AT_ONCE = 1024


def swap(
    flat: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    call: Call,
    *,
    adds: bool = False,
) -> Tensor:
    """Sends `sent[r]` consecutive elements of flat to rank r; returns what came, in rank order.

    `adds` is for the record: whether what comes is then added up.
    """
    link = call.group.link
    if link is None:
        return flat.clone()
    call.count(received, flat.itemsize, adds=adds)
    outgoing = flat.to(link.device)
    incoming = outgoing.new_empty(sum(received))
    work = link.begin(
        dist.all_to_all_single(
            incoming, outgoing, list(received), list(sent), link.process_group, async_op=True
        )
    )
    link.wait([work], call)
    return incoming.to(flat.device)


def spread(flat: Tensor, owned: Sequence[int], call: Call) -> None:
    """Fills flat on all ranks, of which rank r brings `owned[r]` consecutive elements.

    One broadcast for each piece, all under way at once: gloo's all-gather would want pieces of
    one length, and its all-to-all the own piece once for every receiver.
    """
    group, link = call.group, call.group.link
    if link is None:
        return
    call.count(owned, flat.itemsize)
    travelling = flat.to(link.device)
    works = [
        link.begin(dist.broadcast(part, group.ranks[root], link.process_group, async_op=True))
        for root, part in enumerate(cut(travelling, owned))
        if len(part) > 0
    ]
    link.wait(works, call)
    if travelling is not flat:
        flat.copy_(travelling)


def trade(exchange: Exchange, call: Call, index: int) -> Work | None:
    """Starts one round of an algorithm; None if this rank has nothing to do in it.

    Args:
        exchange: of contiguous tensors that lie where the communicator wants them.
        call: what it is part of.
        index: tells apart what goes on side by side in one call; below MOST_AT_ONCE.
    """
    link = call.group.link
    call.count_round(
        [(rank, piece.nbytes) for rank, piece in exchange.receives], exchange.additions
    )
    # Nobody mistakes a message of one course for that of another under way, in whatever order
    # ranks come to them; nccl, which knows no tags, is given them in one order.
    tag = (call.number * MOST_AT_ONCE + index) % 2**31
    sends = [(rank, piece) for rank, piece in exchange.sends if len(piece) > 0]
    receives = [(rank, piece) for rank, piece in exchange.receives if len(piece) > 0]
    if link is None or not (sends or receives):
        return None
    return link.send_and_receive(sends, receives, tag)
