"""The two movements that collectives are made of, on flat buffers.

Pieces may have any lengths, are received straight into place, and are counted. Tensors on a GPU
travel through the host where the communicator wants them there.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from workbench.comm.group import Call
from workbench.comm.pieces import cut


def swap(flat: Tensor, sent: Sequence[int], received: Sequence[int], call: Call) -> Tensor:
    """Sends `sent[r]` consecutive elements of flat to rank r; returns what came, in rank order."""
    link = call.group.link
    if link is None:
        return flat.clone()
    call.count(received, flat.itemsize)
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
