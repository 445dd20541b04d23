"""Which module computes the attention of the heads that a rank holds."""

from typing import cast

from torch import nn

from workbench.comm.groups.group import Group
from workbench.layers.context import BatchContext
from workbench.layers.idle import GivenType
from workbench.layers.self_attention import LocalSelfAttention
from workbench.layers.window_attention import LocalWindowAttention
from workbench.model.attention import is_window_attention
from workbench.plan.graph import Layer
from workbench.plan.layout import ROWS, Layout
from workbench.plan.placement import Shard
from workbench.plan.plan import Plan
from workbench.plan.weights import heads_of


def heads_layout(plan: Plan, layer: Layer) -> Layout:
    """How a tensor [rows, heads, ...] lies inside an attention layer under a plan."""
    choice, read = plan.layers.get(layer.name), plan.flow.inputs[layer.name]
    if read == ROWS or choice is None or choice.scheme != "shard_heads":
        return read
    return Layout(read.group_size, Shard(1, heads_of(layer, choice)))


def local_attention(
    module: nn.Module,
    layer: Layer,
    heads: Layout,
    context: BatchContext,
    group: Group | None,
    dtype: GivenType | None = None,
) -> nn.Module:
    """The attention of the heads held here, with random masks that no split can change.

    Args:
        module: torch's or torchvision's, with this rank's pieces of the weights.
        layer: of kind "attention".
        heads: how [rows, heads, ...] lie (`heads_layout`).
        context: says which rows are held.
        group: over which heads are cut; None: every rank has all of them.
        dtype: of its output, for a rank without heads.
    """
    if is_window_attention(module):
        return LocalWindowAttention(module, layer, heads, context, group, dtype)
    return LocalSelfAttention(cast(nn.MultiheadAttention, module), layer, heads, context, dtype)
