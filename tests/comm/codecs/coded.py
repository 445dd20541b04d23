"""What the tests of codecs share."""

import torch

from workbench.comm.codecs.coding import PieceCoding, coder_of
from workbench.plan.collective.codec import Codec

CPU = torch.device("cpu")
NAMES = ("fp16", "bf16", "bf16_truncated", "int8", "int4", "top_k")


def coding(codec: Codec, residual=None) -> PieceCoding:
    return PieceCoding(coder_of(codec, CPU), CPU, residual)


def encoded(x, codec: Codec):
    """The bytes of x."""
    made = coding(codec)
    (wire,) = made.buffers([len(x)])
    made.encode(x, wire)
    return wire


def round_trip(x, codec: Codec):
    """What arrives of x, filled in and added to zeros: the two are the same."""
    made, wire = coding(codec), encoded(x, codec)
    assert len(wire) == codec.encoded_bytes(len(x))
    filled, added = torch.full_like(x, torch.nan), torch.zeros_like(x)
    made.decode(wire, filled)
    made.add(wire, added)
    assert torch.equal(filled, added)
    return filled


def laplace(ranks: int, length: int = 2**18):
    """Gradients as pipe_sgd's figures take them: Laplace, seeded."""
    uniform = torch.rand(ranks, length, generator=torch.Generator().manual_seed(1)) - 0.5
    return list(-uniform.sign() * torch.log1p(-2 * uniform.abs()))
