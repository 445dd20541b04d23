"""The all-reduce that its caller waits for, out of place."""

import torch
from torch import Tensor

from workbench.comm.algorithms.course import begin
from workbench.comm.algorithms.over_hosts import sum_over_hosts
from workbench.comm.codecs.coded import checked, coding_of
from workbench.comm.groups.group import Group
from workbench.comm.groups.record import Phase
from workbench.comm.pieces import accumulator, shaped
from workbench.comm.shared_memory import collectives as shared
from workbench.plan.all_reduce import Algorithm
from workbench.plan.codec import Codec

# The first portion is on the wire soon, and the last, for which nothing is left to do, is small.
PORTION_BYTES = 2**22


@torch.no_grad()
def all_reduce(
    x: Tensor,
    group: Group,
    *,
    algorithm: Algorithm = "auto",
    codec: Codec | str | None = None,
    residual: Tensor | None = None,
    layer: str = "",
    phase: Phase = "step",
) -> Tensor:
    """Sums all ranks' x on every rank, where the sums have the same bits.

    Args:
        x: of one shape and dtype on all ranks.
        group: who sums.
        algorithm: who sums what, and what travels. "direct" and "hierarchical" go through the
            memory that ranks of a host share; the others through torch's communicators, even
            there.
        codec: what values become while they travel through communicators: also on one host, unless
            the algorithm is "hierarchical", which codes between hosts only. Sums are taken in fp32
            or wider. None: values stay as they are.
        residual: for a codec with error feedback: flat, as long as x, in fp32 or wider, of zeros at
            first. What it holds is added to what this rank encodes, and replaced by what that
            leaves out.
        layer: labels the record, like `phase`.
        phase: of the step.

    Raises:
        ValueError: there is no such algorithm, or it cannot take a codec, or the codec cannot take
            x or `residual`.
        CodecError: a value is no number, or too large for the codec.
        CommError: other ranks did not come, or came for something else.
    """
    codec = checked(codec, x, group, residual)
    name = group.chosen(algorithm, x.nbytes, beside=False, codec=codec)
    call, link = group.call("all_reduce", layer, phase), group.link
    coding = coding_of(codec, call, residual)
    with call.timed():
        if link is None:
            total = shaped(x.reshape(-1).clone(), x.shape)
        elif link.staging is not None and (
            name == "hierarchical" or (name == "direct" and coding is None)
        ):
            call.count_two_rounds(x.numel(), x.itemsize, range(group.size))
            total = shared.all_reduce(x, link.staging, call, call.mark)
        else:
            wide = x.dtype if name != "backend" and coding is None else accumulator(x.dtype)
            flat = torch.empty(x.numel(), dtype=wide, device=link.device)
            flat.view(x.shape).copy_(x)
            if name == "hierarchical":
                sum_over_hosts(flat, link, call, PORTION_BYTES, coding)
            else:
                begin(name, flat, link, call, coding).wait()
            call.mark("copy")
            total = shaped(flat.to(x.device, x.dtype), x.shape)
        call.conclude()
        return total
