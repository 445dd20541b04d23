"""A codec for one all-reduce of a group."""

from torch import Tensor

from workbench.comm.codecs.coding import Coding, coder_of
from workbench.comm.groups.group import Call, Group
from workbench.comm.pieces import accumulator
from workbench.plan.codec import Codec, as_codec


def checked(
    codec: Codec | str | None, x: Tensor, group: Group, residual: Tensor | None
) -> Codec | None:
    """The codec that is meant; refuses what cannot be coded before anybody communicates.

    Raises:
        ValueError: there is no such codec, or x is of a type that codecs do not know, or `residual`
            is not what the codec wants for it.
    """
    codec = as_codec(codec)
    if codec is None:
        if residual is not None:
            raise ValueError("a residual is for a codec with error feedback, and none was given")
        return None
    if not isinstance(codec, Codec):
        raise ValueError(f"codec must be a Codec, a name or None, got {type(codec).__name__}")
    if not x.is_floating_point():
        raise ValueError(f"codec {codec.name!r} is for floating-point tensors, got {x.dtype}")
    if codec.error_feedback != (residual is not None):
        does = "needs" if codec.error_feedback else "has no use for"
        raise ValueError(
            f"codec {codec.name!r} with error_feedback={codec.error_feedback} {does} a residual"
        )
    if residual is not None:
        device = x.device if group.link is None else group.link.device
        wanted = ((x.numel(),), accumulator(x.dtype), device.type)
        given = (tuple(residual.shape), residual.dtype, residual.device.type)
        if given != wanted:
            raise ValueError(f"the residual must be {wanted}, got {given}")
    return codec


def coding_of(codec: Codec | None, call: Call, residual: Tensor | None) -> Coding | None:
    """What codes in a call of a group of two or more; None: nothing does."""
    group = call.group
    if codec is None or group.link is None:
        return None
    what = f"{call}, rank {group.ranks[group.rank]}"
    return Coding(coder_of(codec, group.link.device), residual, what, call.mark)
