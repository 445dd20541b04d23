"""Attention that can be sharded by heads: its detection, and its form in a graph."""

import inspect
import operator
from typing import Any

import torch.fx
from torch import Tensor, nn
from torch.fx import Node

# The arguments of nn.MultiheadAttention besides query, key and value in plain self-attention.
# Attention weights may be requested, as long as nothing reads them.
_PLAIN = {"key_padding_mask": None, "attn_mask": None, "is_causal": False}


class SelfAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` of a sequence with itself: one tensor in, one tensor out.

    Args:
        attention: the module whose weights and constants are used.
        causal: whether a token attends to none behind it.
    """

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


def find_self_attention(graph: torch.fx.Graph, root: nn.Module, *copies: nn.Module) -> None:
    """Replaces `nn.MultiheadAttention` by `SelfAttention` where it is called as self-attention.

    Every call of the module must be so; other modules stay as they are.

    Args:
        graph: the traced graph of a `ValueTracer`, with its values.
        root: the module that was traced, which gets the new submodules.
        copies: the copies of the root, which get new submodules of their own.
    """
    calls: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    for path, nodes in calls.items():
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


def _can_be_cut(module: nn.MultiheadAttention) -> bool:
    """Whether query, key and value come from one weight, heads from nothing else, rows first."""
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    extra = module.bias_k is not None or module.add_zero_attn
    return module.batch_first and module._qkv_same_embed_dim and not hooked and not extra


def _causal(node: Node, module: nn.MultiheadAttention) -> bool | None:
    """Whether a call is self-attention to what came before; None: it is something else."""
    given = inspect.signature(module.forward).bind(*node.args, **node.kwargs)
    given.apply_defaults()
    arguments: dict[str, Any] = given.arguments
    x = arguments["query"]
    alike = x is arguments["key"] is arguments["value"] and x.meta["values"][0].ndim == 3
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
