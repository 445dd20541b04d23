"""Attention that can be sharded by heads: its detection, and its form in a graph.

`nn.MultiheadAttention` of a sequence with itself is one layer, whose weights are cut by heads. With
a mask besides, it is written out as others write it: a linear layer for query, key and value, an
operation on heads, and a linear layer for the output. What an operation does with heads and masks
is shown by trying.
"""

import inspect
import math
import operator
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

# The arguments of nn.MultiheadAttention besides query, key and value in plain self-attention.
# Attention weights may be requested, as long as nothing reads them.
_PLAIN = {"key_padding_mask": None, "attn_mask": None, "is_causal": False}


class SelfAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` of a sequence with itself: one tensor in, one tensor out."""

    def __init__(self, attention: nn.MultiheadAttention, causal: bool) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(attention.__dict__)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Maps [B, tokens, embed_dim] to the same shape."""
        mask = None
        if self.causal:  # torch asks for the mask, and does not read it
            mask = x.new_ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        causal = self.causal
        return super().forward(x, x, x, None, False, attn_mask=mask, is_causal=causal)[0]


def is_window_attention(module: nn.Module) -> bool:
    """Whether a module is torchvision's attention of Swin, version 1 or 2."""
    names = ("ShiftedWindowAttention", "ShiftedWindowAttentionV2")
    where = type(module).__module__
    return where == "torchvision.models.swin_transformer" and type(module).__name__ in names


def masked_self_attention(graph: torch.fx.Graph, root: nn.Module) -> frozenset[str]:
    """The paths of attention of a sequence with itself that gets a mask, or gives its weights."""
    found = set()
    for path, nodes in _calls(graph).items():
        module = root.get_submodule(path)
        if type(module) is nn.MultiheadAttention and _has_usual_weights(module):
            if all(_reads_itself(node, module) for node in nodes):
                ways = {_causal(node, module) for node in nodes}
                if None in ways or len(ways) > 1:
                    found.add(path)
    return frozenset(found)


def written_out(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`nn.MultiheadAttention.forward` of a sequence with itself, operation by operation.

    Masks are truths or what is added to the scores: `key_padding_mask` [B, tokens], `attn_mask`
    [tokens, tokens] or [B * heads, tokens, tokens].
    """
    x = query if module.batch_first else query.transpose(0, 1)
    heads = module.num_heads
    qkv = F.linear(x, module.in_proj_weight, module.in_proj_bias)
    q, k, v = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in qkv.chunk(3, -1))
    drop = module.dropout if module.training else 0.0
    causal = is_causal and key_padding_mask is None and not need_weights  # as torch has it
    mask = None if causal else _added(key_padding_mask, attn_mask, heads, x)
    weights = None
    if need_weights:
        scores = (q * math.sqrt(1.0 / module.head_dim)) @ k.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = F.dropout(weights, drop) if drop > 0 else weights
        mixed = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, drop, causal)
    out = module.out_proj
    y = F.linear(mixed.transpose(1, 2).flatten(2), out.weight, out.bias)
    return y if module.batch_first else y.transpose(0, 1), weights


def _added(padding: Tensor | None, pairs: Tensor | None, heads: int, x: Tensor) -> Tensor | None:
    """What masks add to scores [B, heads, tokens, tokens], or something that spreads to it."""
    if pairs is not None:
        pairs = _numbers(pairs, x)
        pairs = pairs.unflatten(0, (-1, heads)) if pairs.ndim == 3 else pairs
    if padding is None:
        return pairs
    padding = _numbers(padding, x)[:, None, None]
    return padding if pairs is None else pairs + padding


def _numbers(mask: Tensor, x: Tensor) -> Tensor:
    if torch.is_floating_point(mask):
        return mask
    return torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask, -math.inf)


def find_self_attention(graph: torch.fx.Graph, root: nn.Module, *copies: nn.Module) -> None:
    """Replaces `nn.MultiheadAttention` by `SelfAttention` where it is called as self-attention.

    Every call of the module must be so; other modules stay as they are.
    """
    for path, nodes in _calls(graph).items():
        module = root.get_submodule(path)
        if type(module) is nn.MultiheadAttention and _can_be_cut(module):
            ways = {_causal(node, module) for node in nodes}
            causal = ways.pop()
            if causal is not None and not ways:
                for whole in (root, *copies):
                    attention: Any = whole.get_submodule(path)
                    whole.set_submodule(path, SelfAttention(attention, causal))
                for node in nodes:
                    _give_one_tensor(node)


def _calls(graph: torch.fx.Graph) -> dict[str, list[Node]]:
    """The calls of each module, by its path."""
    calls: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    return calls


def _can_be_cut(module: nn.MultiheadAttention) -> bool:
    """Whether query, key and value come from one weight, heads from nothing else, rows first."""
    return module.batch_first and _has_usual_weights(module)


def _has_usual_weights(module: nn.MultiheadAttention) -> bool:
    """Whether query, key and value come from one weight, and heads from nothing else."""
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    extra = module.bias_k is not None or module.add_zero_attn
    return module._qkv_same_embed_dim and not hooked and not extra


def _arguments(node: Node, module: nn.MultiheadAttention) -> dict[str, Any]:
    given = inspect.signature(module.forward).bind(*node.args, **node.kwargs)
    given.apply_defaults()
    return given.arguments


def _reads_itself(node: Node, module: nn.MultiheadAttention) -> bool:
    """Whether a call gets one sequence of each sample as query, key and value."""
    arguments = _arguments(node, module)
    x = arguments["query"]
    return x is arguments["key"] is arguments["value"] and x.meta["values"][0].ndim == 3


def _causal(node: Node, module: nn.MultiheadAttention) -> bool | None:
    """Whether a call is self-attention to what came before; None: it is something else."""
    arguments = _arguments(node, module)
    alike = _reads_itself(node, module)
    plain = all(arguments[name] is value for name, value in _PLAIN.items())
    unpadded = arguments["key_padding_mask"] is None
    # Then torch takes no mask that is given besides.
    causal = unpadded and arguments["is_causal"] is True and arguments["need_weights"] is False
    read = all(_is_output(user) or _is_unread(user) for user in node.users)
    return causal if alike and read and (plain or causal) else None


def _is_output(user: Node) -> bool:
    return user.target is operator.getitem and bool(user.args[1] == 0)


def _is_unread(user: Node) -> bool:
    return user.target is operator.getitem and not user.users


def _give_one_tensor(node: Node) -> None:
    """Makes the node's call take one tensor, and its readers read its output."""
    node.args, node.kwargs = node.args[:1] or (node.kwargs["query"],), {}
    node.meta["values"] = tuple(value[0] for value in node.meta["values"])
    for user in list(node.users):
        user.replace_all_uses_with(node)
        node.graph.erase_node(user)
