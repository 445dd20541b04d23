"""Finds what a module remembers in Python from one forward pass to the next.

A graph records one forward pass. If a pass changes attributes of a module (`self.t *= 0.9`,
`self.last = y`), or what its code reaches otherwise (a global, a closure, an iterator), the module
is traced once more, as the first pass has left it. What it only leaves behind, such as an
activation that others look at, makes no difference then. Values that change again, or other
operations, are state: ranks would not have it, and computed once more, a segment would change it
twice.

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
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from workbench.model.errors import TraceError
from workbench.model.tracing.batch import tensors, versions, written_since
from workbench.model.tracing.proxy import Sizes
from workbench.model.tracing.state.python_state import PLAIN, State, Walk, moved

_OWN = frozenset(vars(nn.Module())) - {"training"}


@dataclass(frozen=True)
class Attribute:
    """One attribute of a module.

    Attributes:
        value: the value; containers are copied.
        state: what is in it, as far as it can be compared.
    """

    value: Any
    state: State


Attributes = dict[tuple[str, str], Attribute]
"""By the path of a module and a name; under ("", ""), what the code of all modules can reach."""
_CODE = ("", "")


def attributes_of(root: nn.Module) -> Attributes:
    """Returns the state that a forward pass could change, except parameters and buffers."""
    walk = Walk()
    found = {
        (path, name): Attribute(_copied(value), walk.of(value, name))
        for path, part in root.named_modules()
        for name, value in vars(part).items()
        if name not in _OWN
    }
    return found | {_CODE: Attribute(None, walk.of_classes(root.modules()))}


def _copied(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return value
    return pytree.tree_map(lambda leaf: tuple(leaf) if type(leaf) is Sizes else leaf, value)


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
        """Returns the attributes that the pass has changed, as they are after it."""
        return {key: now for key, now in self.after.items() if _changes(self.before.get(key), now)}


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
            known = before.get((of, name))
            was = value if known is None else known.value
            if isinstance(was, PLAIN) and (type(was) is not type(value) or was != value):
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
    held = [each for each in (*model.parameters(), *model.buffers()) if not is_lazy(each)]
    were = versions(held)
    try:
        yield
    finally:
        after = attributes_of(model)
        changed = [key for key in after if key != _CODE and _changes(before.get(key), after[key])]
        for path, name in changed:
            attributes = vars(model.get_submodule(path))
            if (path, name) in before:
                attributes[name] = before[path, name].value
            else:
                del attributes[name]
    if written_since(were, held):
        raise TraceError(
            f"{type(model).__name__} cannot be traced: a hook or another function writes into the "
            "weights of the module that was given, while a copy of it is traced: a forward pass "
            "must not change what the model holds"
        )
    if changed:
        names = _names({key: after[key] for key in changed}, before)
        raise TraceError(
            f"{type(model).__name__} cannot be traced: a hook or another function sets {names} of "
            "the module that was given, while a copy of it is traced, whose forward does not see "
            "it: let the hook use the module that it is called with, or let forward do what it does"
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
    for (path, name), now in changed.items():
        if (path, name) != _CODE:
            left = pytree.tree_map_only(Proxy, _stale, now.value)
            vars(again.get_submodule(path))[name] = left
    if not structure.training and _is_thrown_away(again, changed, first.before):
        return
    names = _names(changed, first.before)
    try:
        second = trace(again)
    except Exception as error:
        raise TraceError(_state(names)) from error
    again_changed = {
        key: second.after[key] for key, was in changed.items() if _moves(was, second.after[key])
    }
    if again_changed or _read(second.graph) != _read(first.graph):
        raise TraceError(_state(_names(again_changed, changed) or names))


def _is_thrown_away(
    kept: nn.Module, changed: Iterable[tuple[str, str]], before: Attributes
) -> bool:
    """Whether a module that trains again has these attributes as they were before it evaluated."""
    trains = copy.deepcopy(kept)
    trains.train()
    now = attributes_of(trains)
    return all(key in before and not _changes(before[key], now.get(key)) for key in changed)


def _names(changed: Attributes, before: Attributes) -> str:
    """Returns the attributes, and what code reaches otherwise, as words of an error."""
    found = []
    for (path, name), now in changed.items():
        was = before.get((path, name))
        of = moved({} if was is None else was.state, now.state)
        own = f"the attribute {f'{path}.{name}'.lstrip('.')!r}"
        found += [own if name and each.startswith(name) else each for each in of]
    return ", ".join(dict.fromkeys(found))


def _state(names: str) -> str:
    return (
        f"forward changes {names}, and the next forward pass is another one by it: state of the "
        "model itself is not supported, since each rank would have its own. Compute it from the "
        "input, or leave it out"
    )


def _changes(was: Attribute | None, now: Attribute | None) -> bool:
    return was is None or now is None or bool(moved(was.state, now.state))


def _moves(was: Attribute, now: Attribute) -> bool:
    """Whether plain values differ; tensors of another pass always do."""
    return bool(moved(_plain(was.state), _plain(now.state)))


def _plain(state: State) -> State:
    return {name: value for name, value in state.items() if isinstance(value, PLAIN)}


def _read(graph: torch.fx.Graph) -> list[tuple[Any, ...]]:
    """Each operation with its arguments, whatever its name is, without sizes that nobody reads."""
    live = {n for n in graph.nodes if n.op == "output" or tensors(n.meta["values"][0])}
    for node in reversed(graph.nodes):
        if node in live:
            live.update(node.all_input_nodes)
    places = {node: place for place, node in enumerate(n for n in graph.nodes if n in live)}

    def placed(node: Node) -> Any:
        return ("node", places[node])

    return [(node.op, node.target, map_arg((node.args, node.kwargs), placed)) for node in places]


def _stale(proxy: Proxy) -> Any:
    """What a recorded value is in the next pass: a tensor of no parameter, or a number."""
    value = proxy.node.meta["values"][0]
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(tuple(value.shape), dtype=value.dtype, device="meta")


def operations(graph: torch.fx.Graph) -> list[tuple[Any, ...]]:
    """Each operation of a graph, with its name and its arguments."""

    def named(node: Node) -> Any:
        return ("node", node.name)

    return [
        (node.name, node.op, node.target, map_arg((node.args, node.kwargs), named))
        for node in graph.nodes
    ]
