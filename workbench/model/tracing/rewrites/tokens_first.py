"""Operations that get tokens first, as `nn.MultiheadAttention` does unless told otherwise.

A plan places values that have the batch in dimension 0, and layers that read such ones. Of
[tokens, B, features], linear layers, normalizations of features, sums and activations give the same
whichever of the two comes first, and attention is told by `batch_first`. So each is recorded with
the batch first, between transposes. Those between two of them cancel out; what is left of them a
detour takes in (`detours.py`).
"""

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg

from workbench.model.tracing.batch import BATCHES, called, has_tensors
from workbench.model.tracing.rewrites.inplace import changes_in_place
from workbench.model.tracing.rewrites.linears import NamedLinear, TransposedLinear
from workbench.model.tracing.rewrites.turning import (
    Recorder,
    Turning,
    drop_unread,
    give,
    is_turned,
    read_types_before_swaps,
)

_CLOSE = 1e-5
"""The relative difference that is rounding: a kernel takes other elements together."""


def find_tokens_first(graph: torch.fx.Graph, roots: Sequence[nn.Module], record: Recorder) -> None:
    """Makes operations that get tokens first read and give the batch first.

    Args:
        graph: the traced graph of a `ValueTracer`, with its values.
        roots: the module that was traced, and its copies; in each, attention changes.
        record: sets the `meta` of a new node.
    """
    root = roots[0]
    if not any(is_turned(node) for node in graph.nodes if node.op != "output"):
        return
    attention: set[Node] = set()
    for path, nodes in _attention(graph, root).items():
        if all(is_turned(each) for node in nodes for each in _sequences(node, root)):
            attention.update(nodes)
            for whole in roots:
                cast(nn.MultiheadAttention, whole.get_submodule(path)).batch_first = True
    tried: dict[tuple[Any, str], bool] = {}
    for node in list(graph.nodes):
        if node in attention:
            _replace_attention(graph, node, root, record)
        elif node.op in ("call_module", "call_function", "call_method") and is_turned(node):
            if _works_alike(node, root, tried):
                _replace(graph, node, record)
    read_types_before_swaps(graph)
    drop_unread(graph)


def _works_alike(node: Node, root: nn.Module, tried: dict[tuple[Any, str], bool]) -> bool:
    """Whether an operation gives the same if tokens and batch are swapped in all that it reads."""
    read = node.all_input_nodes
    if not any(is_turned(each) for each in read) or changes_in_place(node, root):
        return False
    if not all(isinstance(each.meta["values"][0], Tensor) for each in read):
        return False
    module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
    if module is None or not has_tensors(module):
        if node.target is F.dropout or type(module) is nn.Dropout:
            return True
        arguments = map_arg((node.args, node.kwargs), lambda each: str(each.meta["values"][1]))
        key = (node.target if module is None else type(module), f"{module!r} of {arguments}")
        if key not in tried:  # which takes time where tensors are large
            tried[key] = _gives_the_same(node, root)
        return tried[key]
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    if type(module) in (nn.LayerNorm, nn.RMSNorm):
        shape = cast(nn.LayerNorm, module).normalized_shape
        return len(shape) <= node.meta["values"][0].ndim - 2
    return type(module) in (nn.Linear, TransposedLinear, NamedLinear, nn.Embedding)


def _gives_the_same(node: Node, root: nn.Module) -> bool:
    """Tries an operation without weights on random values, and on the same after a swap.

    At both batch sizes: one may be a number of something else.
    """
    ndim = node.meta["values"][1].ndim
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for size in range(len(BATCHES)):
            generator = torch.Generator().manual_seed(size)
            made = {each: _made_up(each, generator, size) for each in node.all_input_nodes}
            swapped = {each: _swap(value, ndim) for each, value in made.items()}
            try:
                one, other = (_result(node, root, values) for values in (made, swapped))
            except Exception:  # whatever an operation raises for made-up values
                return False
            other = _swap(other, ndim)
            if one.ndim != ndim or (one.dtype, one.shape) != (other.dtype, other.shape):
                return False
            if not torch.allclose(one, other, _CLOSE, _CLOSE, equal_nan=True):
                return False
    return True


def _result(node: Node, root: nn.Module, values: dict[Node, Tensor]) -> Any:
    torch.manual_seed(0)
    arguments = map_arg((node.args, node.kwargs), values.__getitem__)
    return called(node.op, node.target, root, *arguments)


def _made_up(node: Node, generator: torch.Generator, size: int) -> Tensor:
    value: Tensor = node.meta["values"][size]
    made = torch.randn(value.shape, generator=generator)
    return made > 0 if value.dtype == torch.bool else made.to(value.dtype)


def _swap(value: Tensor, ndim: int) -> Tensor:
    """With tokens and batch swapped, where a tensor has both; others are the same for all."""
    return value.transpose(0, 1) if value.ndim == ndim else value


def _replace(graph: torch.fx.Graph, node: Node, record: Recorder) -> None:
    turning = Turning(graph, node, record)
    # An embedding gives one dimension more than it reads.
    ndim = max(each.meta["values"][0].ndim for each in node.all_input_nodes)

    def turned(each: Node) -> Node:
        return turning.turned(each) if each.meta["values"][0].ndim == ndim else each

    with graph.inserting_before(node):
        call = turning.call(node, *map_arg((node.args, node.kwargs), turned))
        back = turning.turned(call)
    give(graph, node, back)


def _attention(graph: torch.fx.Graph, root: nn.Module) -> dict[str, list[Node]]:
    """The calls of each attention that is said to get tokens first, by its path."""
    found: dict[str, list[Node]] = {}
    for node in graph.nodes:
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        if type(module) is not nn.MultiheadAttention or module.batch_first:
            continue
        if not (module._forward_hooks or module._forward_pre_hooks):
            found.setdefault(str(node.target), []).append(node)
    return found


def _bound(node: Node, root: nn.Module) -> inspect.BoundArguments:
    module = root.get_submodule(str(node.target))
    return inspect.signature(module.forward).bind(*node.args, **node.kwargs)


def _sequences(node: Node, root: nn.Module) -> tuple[Node, ...]:
    """What attention reads: query, key and value."""
    arguments = _bound(node, root).arguments
    return tuple(arguments[name] for name in ("query", "key", "value"))


def _replace_attention(
    graph: torch.fx.Graph, node: Node, root: nn.Module, record: Recorder
) -> None:
    turning, bound = Turning(graph, node, record), _bound(node, root)
    with graph.inserting_before(node):
        for name in ("query", "key", "value"):
            bound.arguments[name] = turning.turned(bound.arguments[name])
        call = turning.call(node, bound.args, bound.kwargs)
        turned = turning.turned(turning.part(call, 0))
        weights = turning.part(call, 1) if bound.arguments.get("need_weights", True) else None
    give(graph, node, (turned, weights))
