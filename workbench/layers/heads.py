"""What every attention does with the heads that a rank holds.

B   rows         h   heads held here        d   features of a head
T   tokens       E   features of a token
"""

import torch.nn.functional as F
from torch import Tensor, nn


def split_heads(qkv: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, 3 h d] -> query, key and value, each [B, h, T, d]."""
    batch, tokens, features = qkv.shape
    split = qkv.view(batch, tokens, 3, features // (3 * head_dim), head_dim)
    q, k, v = split.permute(2, 0, 3, 1, 4)
    return q, k, v


def join_heads(mixed: Tensor, out: nn.Linear) -> Tensor:
    """[B, h, T, d] -> [B, T, E], by the output's weight, and by its bias where a rank has it."""
    bias = out.bias if out.bias is not None and out.bias.numel() else None
    return F.linear(mixed.transpose(1, 2).flatten(2), out.weight, bias)
