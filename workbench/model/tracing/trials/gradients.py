"""Finds what a gradient reaches, by a backward pass, and what autograd saves for it.

The recorded graph runs once more on fake tensors, with gradients, and backward from the sum of all
that the model returns. A parameter without a gradient then has none in training either: its
`requires_grad` is off, nothing uses it, or its user is detached. Optimizers skip such parameters,
and all ranks must do the same.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from workbench.model.errors import TraceError
from workbench.model.tracing.batch import is_users_function, tensors
from workbench.model.tracing.trials.saved import memory_of, peaks, watched

Call = Callable[[str, Any, Any, Any], Any]


def trained_parameters(
    graph: torch.fx.Graph, root: nn.Module, batch: Mapping[str, Tensor], call: Call
) -> frozenset[str]:
    """The names of the parameters that receive a gradient, with all names of tied ones.

    It sets `learns` in each node's `meta`: whether a gradient reaches the node's value; and
    `saved`: what autograd saves of the node's operation.

    Args:
        graph: the traced graph of a `ValueTracer`.
        root: the module that it was recorded from, with fake tensors.
        batch: a fake batch of each input, by the name of forward's parameter.
        call: a function that runs an operation: (kind, target, arguments, keyword arguments) ->
            value.

    Raises:
        TraceError: the backward pass fails, as it would in training.
    """
    reached: set[Node] = set()
    with torch.enable_grad():
        held = memory_of([*root.parameters(), *root.buffers()])
        returned = [y for y in _run(graph, root, batch, call, reached, held) if y.requires_grad]
        if returned:
            _back(returned)
    for node in graph.nodes:
        node.meta["learns"] = node in reached
    named = root.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if parameter.grad is not None)


def _run(
    graph: torch.fx.Graph,
    root: nn.Module,
    batch: Mapping[str, Tensor],
    call: Call,
    reached: set[Node],
    held: frozenset[int],
) -> list[Tensor]:
    """The model's outputs; a backward pass from them records the nodes that it reaches."""
    values: dict[Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            return tensors(map_arg(node.args, values.__getitem__))
        if node.op == "placeholder":
            values[node] = batch[str(node.target)]
            continue
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        sources: list[Node] = []
        map_arg((node.args, node.kwargs), sources.append)
        given = [values[source] for source in sources]
        result, node.meta["saved"] = watched(
            partial(call, node.op, node.target, args, kwargs), given, held
        )
        if _is_foreign(node, root) or _meets_parameter(given):
            copies = {source: _copied(values[source]) for source in sources}  # it may write there
            args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
            again = partial(call, node.op, node.target, args, kwargs)
            with suppress(Exception):  # which `_back` explains
                forward, backward = peaks(again, list(copies.values()))
                node.meta["saved"] = replace(node.meta["saved"], forward=forward, backward=backward)
        values[node] = pytree.tree_map(_apart, result)
        for tensor in tensors(values[node]):
            if tensor.requires_grad:
                tensor.register_hook(partial(_note, reached, node))
    raise AssertionError("a graph ends with its output")


def _is_foreign(node: Node, root: nn.Module) -> bool:
    """Whether it is one operation whose code is not torch's: it may make what nobody sees."""
    if node.op == "call_module":
        return not type(root.get_submodule(str(node.target))).__module__.startswith("torch.")
    return node.op == "call_function" and is_users_function(node.target)


def _meets_parameter(given: Sequence[Any]) -> bool:
    """Whether a parameter is broadcast: its gradient is first made as large as the activation's."""
    read = [tensor for value in given for tensor in tensors(value) if tensor.requires_grad]
    sizes = {tensor.numel() for tensor in read}
    return len(sizes) > 1 and any(isinstance(tensor, nn.Parameter) for tensor in read)


def _apart(value: Any) -> Any:
    """A tensor that is no view: one that is changed in place would lose its hook."""
    return value.clone() if isinstance(value, Tensor) and value._is_view() else value


def _copied(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, value)


def _note(reached: set[Node], node: Node, gradient: Tensor | None) -> None:
    if gradient is not None:
        reached.add(node)


def _back(returned: list[Tensor]) -> None:
    try:
        torch.autograd.backward([y.sum() for y in returned])
    except Exception as error:
        raise TraceError(
            f"the backward pass cannot be followed: {type(error).__name__}: {error}. What is not "
            "to be trained is detached, x.detach(); a backward pass of one's own may not depend "
            "on values, as through .item()"
        ) from error
