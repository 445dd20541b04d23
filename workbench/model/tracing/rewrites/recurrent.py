"""Recurrent layers whose states are read, or which read tokens first.

Torch gives the states of a recurrent layer as [layers, B, features], whatever `batch_first` says. A
plan places values that have the batch in dimension 0. So such a layer is recorded as one that reads
and gives all of them with the batch first, and transposes beside it bring back what the model's own
code reads; a detour takes these in (`detours.py`).
"""

import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch.fx
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_map

from workbench.model.tracing.rewrites.turning import Recorder, Turning, drop_unread, give, is_turned


class _BatchFirst(nn.RNNBase):
    """A recurrent layer whose input, output and states all have the batch in dimension 0."""

    def forward(self, x: Tensor, states: Any = None) -> tuple[Tensor, Any]:
        """Maps [B, tokens, features] and states [B, layers, features] to the same."""
        if states is not None:
            states = tree_map(_turned, states)
        output, states = super().forward(x if self.batch_first else _turned(x), states)
        return output if self.batch_first else _turned(output), tree_map(_turned, states)


class BatchFirstLSTM(_BatchFirst, nn.LSTM):  # type: ignore[misc]
    """An LSTM whose states have the batch first."""


class BatchFirstGRU(_BatchFirst, nn.GRU):  # type: ignore[misc]
    """A GRU whose state has the batch first."""


class BatchFirstRNN(_BatchFirst, nn.RNN):  # type: ignore[misc]
    """An Elman network whose state has the batch first."""


_CLASSES: Mapping[type[nn.Module], type[nn.Module]] = MappingProxyType(
    {nn.LSTM: BatchFirstLSTM, nn.GRU: BatchFirstGRU, nn.RNN: BatchFirstRNN}
)


def _turned(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous()


def find_recurrent(graph: torch.fx.Graph, roots: Sequence[nn.Module], record: Recorder) -> None:
    """Makes recurrent layers read and give all their values with the batch first, where it matters.

    Args:
        graph: the traced graph of a `ValueTracer`, with its values.
        roots: the module that was traced, and its copies; in each the layers' classes change.
        record: sets the `meta` of a new node.
    """
    calls: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            if type(roots[0].get_submodule(str(node.target))) in _CLASSES:
                calls.setdefault(str(node.target), []).append(node)
    changed: list[Node] = []
    for path, nodes in calls.items():
        layer = roots[0].get_submodule(path)
        can_be = not (layer._forward_hooks or layer._forward_pre_hooks) and all(
            is_turned(_given(node)["input"]) != layer.batch_first for node in nodes
        )
        if can_be and any(_wants_it(node, layer) for node in nodes):
            for root in roots:
                layer = root.get_submodule(path)
                layer.__class__ = _CLASSES[type(layer)]
            changed += nodes
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in sorted(changed, key=places.__getitem__):  # one may read the states of another
        _replace(graph, node, roots[0].get_submodule(str(node.target)), record)
    if changed:
        drop_unread(graph)


def _given(node: Node) -> dict[str, Any]:
    """What a recurrent layer is called with, by name."""
    return dict(zip(("input", "hx"), node.args, strict=False)) | node.kwargs


def _wants_it(node: Node, layer: nn.Module) -> bool:
    """Whether a call reads tokens first, or a state, or gives one that is read."""
    if not layer.batch_first or len(_given(node)) > 1:
        return True
    parts = [user for user in node.users if user.target is operator.getitem and user.users]
    return any(user.args[1] != 0 for user in parts) or len(parts) < len(_read(node))


def _read(node: Node) -> list[Node]:
    """The users of a tuple, but for parts that nothing reads."""
    return [user for user in node.users if user.target is not operator.getitem or user.users]


def _replace(graph: torch.fx.Graph, node: Node, layer: nn.Module, record: Recorder) -> None:
    """Puts a call with the batch first in the place of one as torch has it."""
    turning = Turning(graph, node, record)

    def turned(value: Any) -> Any:
        return turning.turned(value) if isinstance(value, Node) else value

    given = _given(node)
    with graph.inserting_before(node):
        x = given["input"] if layer.batch_first else turned(given["input"])
        states = map_aggregate(given.get("hx"), turned)
        call = turning.call(node, (x,) if states is None else (x, states), {})
        output, states = turning.part(call, 0), turning.part(call, 1)
        if not layer.batch_first:
            output = turned(output)
        if isinstance(layer, nn.LSTM):
            found = (turned(turning.part(states, 0)), turned(turning.part(states, 1)))
        else:
            found = turned(states)
    give(graph, node, (output, found))
