"""The all-reduce: out of place for callers that wait, in place beside callers that compute on."""

from functools import partial

import torch
from torch import Tensor

from workbench.comm.algorithms.executor import RoundExecutor, begin
from workbench.comm.algorithms.hierarchical import across, sum_over_hosts
from workbench.comm.codecs.coding import PieceCoding, checked, coding_of
from workbench.comm.groups.group import Group, GroupCall, GroupLink
from workbench.comm.messages.flat import AsyncOperation, accumulator, even, shaped
from workbench.comm.messages.recorder import StepPhase
from workbench.comm.pending import Pending
from workbench.comm.shared_memory import collectives as shared
from workbench.comm.shared_memory.meeting import SharedBuffer
from workbench.plan.collective.algorithm import Algorithm
from workbench.plan.collective.codec import AnyCodec

# The first portion is on the wire soon, and the last, for which nothing is left to do, is small.
PORTION_BYTES = 2**22


@torch.no_grad()
def all_reduce(
    x: Tensor,
    group: Group,
    *,
    algorithm: Algorithm = "auto",
    codec: AnyCodec | str | None = None,
    residual: Tensor | None = None,
    layer: str = "",
    phase: StepPhase = "step",
) -> Tensor:
    """Returns the sum of all ranks' x on every rank, with the same bits on all of them.

    Args:
        x: the summand, of one shape and dtype on all ranks.
        group: the ranks that sum.
        algorithm: the algorithm, which says which rank sums what, and what travels. "direct" and
            "hierarchical" go through the memory that ranks of a host share; the others through
            torch's communicators, even there.
        codec: the codec through which values travel between communicators: also on one host,
            unless the algorithm is "hierarchical", which encodes between hosts only. Sums are
            taken in fp32 or wider. None: values stay as they are.
        residual: what a codec with error feedback has left out so far [x.numel()], in fp32 or
            wider, zeros at first. It is added to what this rank encodes, and replaced by what
            that encoding leaves out.
        layer: the layer under which this is recorded.
        phase: the phase of the step under which this is recorded.

    Raises:
        ValueError: there is no such algorithm, or it cannot take a codec, or the codec cannot take
            x or `residual`.
        CodecError: a value is NaN or infinite, or too large for the codec.
        CommError: other ranks did not come, or came for something else.
    """
    codec = checked(codec, x, group, residual)
    name = group.chosen(algorithm, x, beside=False, codec=codec)
    call, link = group.call("all_reduce", layer, phase), group.link
    staging = group.staging_on(x.device)
    coding = coding_of(codec, call, residual)
    with call.timed():
        if link is None:
            total = shaped(x.reshape(-1).clone(), x.shape)
        elif staging is not None and (
            name == "hierarchical" or (name == "direct" and coding is None)
        ):
            call.count_two_rounds(x.numel(), x.itemsize, range(group.size))
            total = shared.all_reduce(x, staging, call, call.mark)
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


def start_all_reduce(
    flat: Tensor,
    group: Group,
    *,
    algorithm: Algorithm = "auto",
    codec: AnyCodec | str | None = None,
    residual: Tensor | None = None,
    layer: str = "",
) -> Pending:
    """Starts to sum `flat` [elements] in place over the group.

    The caller computes on, and leaves `flat` alone until it has waited. Any number may be under
    way; all ranks start them in one order. The sum is bitwise equal on all ranks.

    "backend", which is "auto" where ranks share no memory, runs on threads of its own. All others
    are advanced by the ranks themselves, when they `poll` or wait for anything: cores that compute
    are not taken, and what is on the wire goes on, but no next round begins meanwhile, unless a
    `ProgressThread` advances them.

    "direct" and "hierarchical" sum a buffer that `Group.buffer` made where it lies. Any other
    tensor "direct" sends through the communicator, "auto" within one host leaves to the backend,
    and "hierarchical" sums before this returns, unless the rank is alone on its host: what is
    staged in shared memory cannot be advanced later.

    Args:
        flat: the summand, contiguous and one-dimensional; it becomes the sum.
        group: the ranks that sum.
        algorithm: the algorithm, as for `all_reduce`.
        codec: the codec through which values travel, as for `all_reduce`. What it cannot encode
            is raised here, or by whoever polls or waits.
        residual: what a codec with error feedback has left out so far, as for `all_reduce`; like
            `flat` it is left alone until the caller has waited.
        layer: the layer under which this is recorded.

    Raises:
        ValueError: `flat` is not a contiguous one-dimensional tensor, or there is no such
            algorithm, or it cannot take a codec, or the codec cannot take `flat` or `residual`.
        CodecError: a value is NaN or infinite, or too large for the codec.
        RuntimeError: `flat` is a shared buffer whose last sum has not been waited for.
    """
    if flat.ndim != 1 or not flat.is_contiguous():
        shape, stride = tuple(flat.shape), flat.stride()
        raise ValueError(
            f"an all-reduce in place takes one contiguous dimension, got shape {shape}, "
            f"stride {stride}, in group {group.name}"
        )
    flat = flat.detach()
    codec = checked(codec, flat, group, residual)
    buffer = group.shared(flat)
    name = group.chosen(algorithm, flat, beside=buffer is None, codec=codec)
    call, link = group.call("all_reduce", layer, "step"), group.link
    if link is None:
        return Pending(call, None)
    coding = coding_of(codec, call, residual)
    staged = name == "direct" and link.staging is not None and coding is None
    with call.told("helping"):
        if buffer is not None and (staged or name == "hierarchical"):
            _start_buffer(buffer, len(flat), link, call, coding)
            pending = Pending(call, buffer)
        else:
            wide = flat.dtype if name != "backend" and coding is None else accumulator(flat.dtype)
            travelling = flat.to(link.device, wide)
            start = _start_over_hosts if name == "hierarchical" else partial(begin, name)
            copied_back = None if travelling is flat else (flat, travelling)
            progress = start(travelling, link, call, coding)
            pending = Pending(call, progress, copied_back, by_itself=name == "backend")
    if not pending.by_itself:
        link.watch.also(pending.poll)
    return pending


def _start_buffer(
    buffer: SharedBuffer, length: int, link: GroupLink, call: GroupCall, coding: PieceCoding | None
) -> None:
    """Starts to sum a shared buffer of `length` elements where it lies, then across hosts."""
    staging, rank = buffer.staging, call.group.rank
    own = None if coding is None else coding.cut(even(length, staging.size))[staging.rank]
    call.count_two_rounds(length, buffer.nbytes // length, link.beside(rank))

    def cross(segment: Tensor) -> RoundExecutor:
        return RoundExecutor(across(segment, length, link.hosts, rank, own), call)

    buffer.start(call, None if len(link.hosts) == 1 else cross, call.mark)


def _start_over_hosts(
    flat: Tensor, link: GroupLink, call: GroupCall, coding: PieceCoding | None
) -> AsyncOperation:
    if link.local is None:
        return RoundExecutor(across(flat, len(flat), link.hosts, call.group.rank, coding), call)
    with call.timed():
        sum_over_hosts(flat, link, call, flat.nbytes, coding)
    return RoundExecutor(iter(()), call)  # nothing is left to do
