"""Attention of the heads that a rank holds: of a sequence with itself, and inside shifted windows.

B   rows         h   heads held here        d   features of a head
T   tokens       E   features of a token

    x          [B, T, E]     replicated: the group's rows
    q, k, v    [B, h, T, d]  by the rows of the weights that belong to these heads
    weights    [B, h, T, T]  softmax of q k / sqrt(d)
    output     [B, T, E]     a summand: by these heads' columns of the output's weight

Nothing is communicated inside. The group adds up the outputs, and in the backward pass the
gradients of x, where the plan says so; the output's bias is added by one rank.

Source: Shoeybi et al. 2019 (arXiv:1909.08053, sec. 3).
"""

import copy
import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.comm.groups.group import Group
from workbench.comm.regions import copy_to
from workbench.layers.local.context import BatchContext
from workbench.layers.local.draws import PlacedDropout
from workbench.layers.local.idle import OutputType, nothing
from workbench.model.record.attention import is_window_attention
from workbench.plan.graph.graph import Layer
from workbench.plan.placement.flow import heads_of
from workbench.plan.placement.placement import Layout, Replicate, Shard
from workbench.plan.plans.plan import Plan


def split_heads(qkv: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts [B, T, 3 h d] into query, key and value, each [B, h, T, d]."""
    batch, tokens, features = qkv.shape
    split = qkv.view(batch, tokens, 3, features // (3 * head_dim), head_dim)
    q, k, v = split.permute(2, 0, 3, 1, 4)
    return q, k, v


def join_heads(mixed: Tensor, out: nn.Linear) -> Tensor:
    """Maps [B, h, T, d] to [B, T, E] by the output's weight, and its bias where a rank has it."""
    bias = out.bias if out.bias is not None and out.bias.numel() else None
    return F.linear(mixed.transpose(1, 2).flatten(2), out.weight, bias)


class LocalSelfAttention(nn.Module):
    """`torch.nn.MultiheadAttention` of a sequence with itself, by the heads held here.

    Args:
        local: the module with this rank's pieces; weights keep their names.
        heads: how [rows, heads, ...] lie (`heads_layout`).
    """

    in_proj_weight: Tensor
    in_proj_bias: Tensor | None
    out_proj: nn.Linear
    head_dim: int
    causal: bool

    def __init__(
        self,
        local: nn.MultiheadAttention,
        layer: Layer,
        heads: Layout,
        context: BatchContext,
        dtype: OutputType | None = None,
    ) -> None:
        super().__init__()
        self.__dict__.update(local.__dict__)
        self.dtype = dtype
        tokens = layer.input_shape[0]
        shape = (layer.heads, tokens, tokens)
        self.drop = PlacedDropout(local.dropout, heads, shape, layer.rows, layer.name, context)
        self.drop.train(local.training)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, T, E] to this rank's summand, of the same shape."""
        if self.in_proj_weight.numel() == 0:
            return nothing(tuple(x.shape), x, *self.parameters(), dtype=self.dtype)
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = split_heads(qkv, self.head_dim)
        if self.training and self.drop.p > 0:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            if self.causal:
                behind = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(behind, -math.inf)
            mixed = self.drop(scores.softmax(-1)) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return join_heads(mixed, self.out_proj)


def called_again(attention: nn.Module, layer: Layer) -> nn.Module:
    """Returns a module that is called a second time as what it is there: it draws otherwise."""
    again = copy.copy(attention)
    again._modules = dict(attention._modules)
    for name, part in again._modules.items():
        if isinstance(part, PlacedDropout):
            own = again._modules[name] = copy.copy(part)
            own.name = layer.name
    return again


# Added to the scores of tokens that only the shift has brought into one window.
_APART = -100.0
_LARGEST_SCALE = math.log(100.0)


class LocalWindowAttention(nn.Module):
    """torchvision's `ShiftedWindowAttention` or its V2, by the heads held here.

    The tokens are those of one window of an image, and what belongs to a head is cut with it:

        version 1   relative_position_bias_table    [offsets, heads]
        version 2   logit_scale                     [heads, 1, 1], of cosine attention
                    cpb_mlp.2.weight                [heads, hidden]: offsets to biases

    The first layer of version 2's `cpb_mlp` is whole on every rank, and each rank's heads give a
    summand of its gradient: one all-reduce of 3 * hidden elements in the backward pass.

    Args:
        local: the module with this rank's pieces; weights keep their names.
        heads: how [rows, heads, ...] lie (`heads_layout`).
        group: the ranks over which heads are cut; None: every rank has all of them.

    Source: Liu et al. 2021 (arXiv:2103.14030), Liu et al. 2022 (arXiv:2111.09883), as in
    torchvision.models.swin_transformer.
    """

    qkv: nn.Linear
    proj: nn.Linear
    relative_position_index: Tensor

    def __init__(
        self,
        local: nn.Module,
        layer: Layer,
        heads: Layout,
        context: BatchContext,
        group: Group | None,
        dtype: OutputType | None = None,
    ) -> None:
        super().__init__()
        self.__dict__.update(local.__dict__)
        self.dtype = dtype
        given: Any = local
        self.name, self.group, self.second = layer.name, group, hasattr(local, "logit_scale")
        self.windows = ShiftedWindows(layer.input_shape[:2], given.window_size, given.shift_size)
        self.head_dim = layer.input_shape[2] // layer.heads
        tokens, rows = self.windows.tokens, layer.rows * self.windows.count
        weights = (layer.heads, tokens, tokens)
        self.drop_weights = PlacedDropout(
            given.attention_dropout, heads, weights, rows, layer.name, context
        )
        # The same elements of every summand: dropout of the sum.
        whole, before = Layout(heads.group_size, Replicate()), 0 < given.attention_dropout < 1
        shape = (tokens, layer.output_shape[-1])
        self.drop = PlacedDropout(
            given.dropout, whole, shape, rows, layer.name, context, index=int(before)
        )
        self.train(local.training)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, H, W, E] to this rank's summand, of the same shape."""
        if self.qkv.weight.numel() == 0:
            hidden = self._hidden_weights() if self.second else None
            return nothing(tuple(x.shape), x, hidden, *self.parameters(), dtype=self.dtype)
        rows = len(x)
        q, k, v = split_heads(self._projected(self.windows.part(x)), self.head_dim)
        scores = self._scores(q, k) + self._position_bias()
        apart = self.windows.apart(x)
        if apart is not None:
            by_window = scores.unflatten(0, (rows, self.windows.count))
            scores = (by_window + apart[:, None]).flatten(0, 1)
        mixed = self.drop_weights(scores.softmax(-1)) @ v
        return self.windows.whole(self.drop(join_heads(mixed, self.proj)), rows)

    def _projected(self, x: Tensor) -> Tensor:
        weight, bias = self.qkv.weight, self.qkv.bias
        if bias is None or not self.second:
            return F.linear(x, weight, bias)
        q, k, v = bias.chunk(3)
        return F.linear(x, weight, torch.cat([q, torch.zeros_like(k), v]))  # keys have no bias

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        if not self.second:
            return (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
        cosines = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        logit_scale: Any = self.logit_scale
        return cosines * logit_scale.clamp(max=_LARGEST_SCALE).exp()

    def _position_bias(self) -> Tensor:
        """Returns what the offset between two tokens adds to their score [1, h, T, T]."""
        module: Any = self
        if self.second:
            hidden, offsets = self._hidden_weights(), module.relative_coords_table.flatten(0, 2)
            table = F.relu(F.linear(offsets, hidden[:, :-1], hidden[:, -1]))
            table = 16 * torch.sigmoid(F.linear(table, module.cpb_mlp[2].weight))
        else:
            table = module.relative_position_bias_table
        tokens = self.windows.tokens
        return table[self.relative_position_index].view(1, tokens, tokens, -1).permute(0, 3, 1, 2)

    def _hidden_weights(self) -> Tensor:
        """Returns weight and bias [hidden, 2 + 1] of version 2's first layer, on every rank."""
        module: Any = self
        first = module.cpb_mlp[0]
        both = torch.cat([first.weight, first.bias[:, None]], dim=1)
        return both if self.group is None else copy_to(both, self.group, layer=self.name)


class ShiftedWindows:
    """The windows of an image, padded to whole ones and shifted in a cycle.

    Args:
        image: height and width of the image [positions].
        size: height and width of a window [positions].
        shift: the shift of the image along both [positions]; there is none in a direction in which
            one window holds it all.
    """

    def __init__(self, image: tuple[int, ...], size: list[int], shift: list[int]) -> None:
        self.image, self.size = image, tuple(size)
        self.grid = tuple(-(-length // held) for length, held in zip(image, size, strict=True))
        self.shift = tuple(s if g > 1 else 0 for s, g in zip(shift, self.grid, strict=True))
        self.padded = tuple(g * s for g, s in zip(self.grid, size, strict=True))
        self.count, self.tokens = math.prod(self.grid), math.prod(size)

    def part(self, x: Tensor) -> Tensor:
        """Cuts [B, H, W, E] into windows [B * windows, tokens, E]."""
        (tall, wide), (height, width) = self.padded, self.image
        x = F.pad(x, (0, 0, 0, wide - width, 0, tall - height))
        if any(self.shift):
            x = x.roll([-s for s in self.shift], dims=(1, 2))
        return self._parted(x)

    def whole(self, x: Tensor, rows: int) -> Tensor:
        """Joins windows [rows * windows, tokens, E] into [rows, H, W, E]; the inverse of `part`."""
        (down, across), (height, width) = self.grid, self.size
        x = x.view(rows, down, across, height, width, x.shape[-1])
        x = x.transpose(2, 3).reshape(rows, down * height, across * width, x.shape[-1])
        if any(self.shift):
            x = x.roll(self.shift, dims=(1, 2))
        return x[:, : self.image[0], : self.image[1]].contiguous()

    def apart(self, like: Tensor) -> Tensor | None:
        """Returns what keeps apart tokens that the shift has joined [windows, tokens, tokens].

        Returns:
            What is added to the scores; None where nothing was shifted.
        """
        if not any(self.shift):
            return None
        # Along each side: the windows before the last, its own part, and what came around.
        down, across = (
            torch.arange(length, device=like.device).ge(length - size).int()
            + torch.arange(length, device=like.device).ge(length - shift)
            for length, size, shift in zip(self.padded, self.size, self.shift, strict=True)
        )
        region = self._parted((3 * down[:, None] + across)[None, :, :, None]).squeeze(-1)
        return (region[:, None] != region[:, :, None]).to(like.dtype) * _APART

    def _parted(self, x: Tensor) -> Tensor:
        """Cuts [B, *padded, E] into windows [B * windows, tokens, E]."""
        (down, across), (height, width) = self.grid, self.size
        rows, features = len(x), x.shape[-1]
        x = x.reshape(rows, down, height, across, width, features).transpose(2, 3)
        return x.reshape(rows * self.count, self.tokens, features)


def heads_layout(plan: Plan, layer: Layer) -> Layout:
    """Returns how a tensor [rows, heads, ...] lies inside an attention layer under a plan."""
    heads = heads_of(layer, plan.layers.get(layer.name))
    read = plan.flow.inputs[layer.name]
    return read if heads is None else Layout(read.group_size, Shard(1, heads))


def local_attention(
    module: nn.Module,
    layer: Layer,
    heads: Layout,
    context: BatchContext,
    group: Group | None,
    dtype: OutputType | None = None,
) -> nn.Module:
    """Returns the attention of the heads held here, with random masks that no split can change.

    Args:
        heads: how [rows, heads, ...] lie (`heads_layout`).
        group: the ranks over which heads are cut; None: every rank has all of them.
    """
    if is_window_attention(module):
        return LocalWindowAttention(module, layer, heads, context, group, dtype)
    return LocalSelfAttention(cast(nn.MultiheadAttention, module), layer, heads, context, dtype)
