"""Self-attention of the heads that a rank holds.

    x          [B, T, E]     replicated: the group's rows
    q, k, v    [B, h, T, d]  by the rows of the weights that belong to these heads
    weights    [B, h, T, T]  softmax of q k / sqrt(d)
    output     [B, T, E]     a summand: by these heads' columns of the output's weight

Nothing is communicated inside. The group adds up the outputs, and in the backward pass the
gradients of x, where the plan says so; the output's bias is added by one rank.

Source: Shoeybi et al. 2019 (arXiv:1909.08053, sec. 3).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from workbench.layers.context import BatchContext
from workbench.layers.dropout import PlacedDropout
from workbench.layers.heads import join_heads, split_heads
from workbench.layers.idle import nothing
from workbench.plan.graph import Layer
from workbench.plan.layout import Layout


class LocalSelfAttention(nn.Module):
    """`torch.nn.MultiheadAttention` of a sequence with itself, by the heads held here.

    Args:
        local: the module with this rank's pieces; weights keep their names.
        layer: its layer.
        heads: how [rows, heads, ...] lie (`heads_layout`).
        context: says which rows are held.
    """

    in_proj_weight: Tensor
    in_proj_bias: Tensor | None
    out_proj: nn.Linear
    head_dim: int

    def __init__(
        self, local: nn.MultiheadAttention, layer: Layer, heads: Layout, context: BatchContext
    ) -> None:
        super().__init__()
        self.__dict__.update(local.__dict__)
        tokens = layer.input_shape[0]
        shape = (layer.heads, tokens, tokens)
        self.drop = PlacedDropout(local.dropout, heads, shape, layer.rows, layer.name, context)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, T, E] to this rank's summand, of the same shape."""
        if self.in_proj_weight.numel() == 0:
            return nothing(tuple(x.shape), x, *self.parameters())
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = split_heads(qkv, self.head_dim)
        if self.training and self.drop.p > 0:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            mixed = self.drop(scores.softmax(-1)) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v)
        return join_heads(mixed, self.out_proj)
