"""Finds what a module keeps in its attributes from one forward pass to the next.

A graph records one forward pass. If a pass changes plain attributes of a module (`self.t *= 0.9`,
`self.last = y`), the module is traced once more, as the first pass has left it. What it only leaves
behind, such as an activation that others look at, makes no difference then. Numbers that change
again, or other operations, are state: ranks would not have it, and computed once more, a segment
would change it twice.

What a pass in evaluation mode keeps, and the module's own `train()` throws away, is no state:
weights do not change meanwhile, and computed anew it is the same (the biases of LeViT's attention).
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.fx import Node, Proxy
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from workbench.model.errors import TraceError
from workbench.model.tracing.proxy import Sizes

_OWN = frozenset(vars(nn.Module())) - {"training"}
_MISSING = object()
_PLAIN = (bool, int, float, complex, str)

Attributes = dict[tuple[str, str], Any]
"""Values of attributes, by the path of a module and a name."""


def attributes_of(root: nn.Module) -> Attributes:
    """The attributes of all modules that a forward pass could change; containers are copied."""
    return {
        (path, name): pytree.tree_map(_copied, value)
        for path, part in root.named_modules()
        for name, value in vars(part).items()
        if name not in _OWN
    }


def _copied(leaf: Any) -> Any:
    return tuple(leaf) if type(leaf) is Sizes else leaf


@dataclass(frozen=True)
class Pass:
    """A recorded forward pass.

    Attributes:
        root: the module, as the pass has left it.
        graph: its operations.
        before: the attributes of the module before it.
        after: the attributes after it.
    """

    root: nn.Module
    graph: torch.fx.Graph
    before: Attributes
    after: Attributes

    def changed(self) -> Attributes:
        """The attributes that the pass has changed, as they are after it."""
        return {k: value for k, value in self.after.items() if _differ(self.before.get(k), value)}


def refuse_set(root: nn.Module, path: str, before: Attributes) -> None:
    """Checks that a module of torch's that is one layer is as it was before the pass.

    The traced model has it as it was: what forward sets, as `self.drop.p = 0.0`, is not recorded.

    Args:
        root: the module that is traced.
        path: the path of the layer.
        before: the attributes of the root before the pass.

    Raises:
        TraceError: an attribute or the mode of it differs.
    """
    layer = root.get_submodule(path)
    if not type(layer).__module__.startswith("torch."):
        return
    for inner, part in layer.named_modules():
        of = f"{path}.{inner}" if inner else path
        for name, value in vars(part).items():
            was = before.get((of, name), value)
            if isinstance(was, _PLAIN) and _differ_leaves(was, value):
                raise TraceError(
                    f"forward sets {of}.{name}, which was {was!r}, to {value!r}, and a graph has "
                    "the layer as it was: set it in __init__, or, where it is of a mode, in a "
                    "train() of the model's own"
                )


@contextmanager
def left_alone(model: nn.Module) -> Iterator[None]:
    """Leaves the attributes of the module that was given as they were: a copy of it is traced.

    Raises:
        TraceError: a pass of the copy changed some, through a function that holds the module.
    """
    before = attributes_of(model)
    try:
        yield
    finally:
        after = attributes_of(model)
        changed = [key for key in after if _differ(before.get(key, _MISSING), after[key])]
        for path, name in changed:
            held = vars(model.get_submodule(path))
            if (path, name) in before:
                held[name] = before[path, name]
            else:
                del held[name]
    if changed:
        raise TraceError(
            f"{type(model).__name__} cannot be traced: a hook or another function sets the "
            f"attribute {_names(changed)} of the module that was given, while a copy of it is "
            "traced, whose forward does not see it: let the hook use the module that it is called "
            "with, or let forward do what it does"
        )


def show_no_state(structure: nn.Module, first: Pass, trace: Callable[[nn.Module], Pass]) -> None:
    """Checks that a second forward pass does what the first one did.

    Args:
        structure: the module, as it was before the first pass.
        first: the first pass.
        trace: a function that records a module's pass.

    Raises:
        TraceError: it does something else.
    """
    changed = first.changed()
    if not changed:
        return
    for path in {str(node.target) for node in first.graph.nodes if node.op == "call_module"}:
        refuse_set(first.root, path, first.before)
    again = copy.deepcopy(structure)
    for (path, name), value in changed.items():
        left = pytree.tree_map_only(Proxy, _stale, value)
        vars(again.get_submodule(path))[name] = left
    if not structure.training and _is_thrown_away(again, changed, first.before):
        return
    names = _names(changed)
    try:
        second = trace(again)
    except Exception as error:
        raise TraceError(_state(names)) from error
    moves = any(_numbers(second.after.get(k)) != _numbers(value) for k, value in changed.items())
    if moves or operations(second.graph) != operations(first.graph):
        raise TraceError(_state(names))


def _is_thrown_away(
    kept: nn.Module, changed: Iterable[tuple[str, str]], before: Attributes
) -> bool:
    """Whether a module that trains again has these attributes as they were before it evaluated."""
    trains = copy.deepcopy(kept)
    trains.train()
    now = attributes_of(trains)
    return all(key in before and not _differ(before[key], now.get(key)) for key in changed)


def _names(keys: Iterable[tuple[str, str]]) -> str:
    return ", ".join(repr(f"{path}.{name}".lstrip(".")) for path, name in keys)


def _state(names: str) -> str:
    return (
        f"forward changes the attribute {names}, and the next forward pass is another one by it: "
        "state of the model itself is not supported, since each rank would have its own. Compute "
        "it from the input, or leave it out"
    )


def _differ(first: Any, second: Any) -> bool:
    (old, before), (new, after) = map(pytree.tree_flatten, (first, second))
    return after != before or any(map(_differ_leaves, old, new))


def _differ_leaves(first: Any, second: Any) -> bool:
    plain = isinstance(first, _PLAIN) and type(first) is type(second)
    return bool(first != second) if plain else first is not second


def _numbers(value: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, _PLAIN)]


def _stale(proxy: Proxy) -> Any:
    """What a recorded value is in the next pass: a tensor of no parameter, or a number."""
    value = proxy.node.meta["values"][0]
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def operations(graph: torch.fx.Graph) -> list[tuple[Any, ...]]:
    """Each operation of a graph, with its name and its arguments."""

    def named(node: Node) -> Any:
        return ("node", node.name)

    return [
        (node.name, node.op, node.target, map_arg((node.args, node.kwargs), named))
        for node in graph.nodes
    ]
