"""What a forward pass keeps, writes, or would lose.

A graph records one forward pass. If a pass changes attributes of a module (`self.t *= 0.9`,
`self.last = y`), or what its code reaches otherwise (a global, a closure, an iterator), the module
is traced once more, as the first pass has left it. What it only leaves behind, such as an
activation that others look at, makes no difference then. Values that change again, or other
operations, are state: ranks would not have it, and computed once more, a segment would change it
twice. What a pass in evaluation mode keeps, and the module's own `train()` throws away, is no
state: weights do not change meanwhile, and computed anew it is the same (the biases of LeViT's
attention).

A pass that writes into parameters and buffers keeps state, too. A traced graph would not even have
the operation: `for p in self.parameters(): p.data.clamp_(-1, 1)` involves no proxy. Every operation
on fake tensors passes through their mode (`ModelFakes`), whatever way led to it, and says in its
schema what it writes into. Values do not matter: a clamp that clips nothing yet is a write.

Hooks on gradients, wrappers and compiled code are not in a graph: modules with such are refused.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, MappingProxyType
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node, Proxy
from torch.fx.node import map_arg
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from workbench.model.errors import InsideError, TraceError
from workbench.model.record.batch import tensors, versions, written_since
from workbench.model.record.failure import Place, is_users
from workbench.model.record.proxy import Sizes
from workbench.model.record.python_state import PLAIN, State, Walk, moved
from workbench.model.record.runs import memory_of

_OWN = frozenset(vars(nn.Module())) - {"training"}


@dataclass(frozen=True)
class Attribute:
    """One attribute of a module."""

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
    """A recorded forward pass."""

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


# Properties of torch.fx.GraphModule, which would hide submodules of these names.
_HIDING = {"code", "graph"}
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def refuse_what_is_lost(model: nn.Module) -> None:
    """Checks that a traced copy computes what the model does.

    Raises:
        TraceError: it would not; the text says which part of the model, and what to do.
    """
    for said in _lost(model):
        raise TraceError(f"{type(model).__name__} cannot be traced: {said}")


def refuse_backward_hooks(part: nn.Module, path: str) -> None:
    """Checks that a module whose parts become layers of their own has no hooks on its gradient.

    A module that is one layer keeps its own.

    Raises:
        TraceError: it has some.
    """
    if part._backward_hooks or part._backward_pre_hooks:
        raise TraceError(
            f"the backward hooks of {path!r} would be lost, since its parts are layers of their "
            "own: put them on these parts (a single nn.Linear or nn.Conv2d), or let forward scale "
            "the gradient, 0.1 * x + (0.9 * x).detach()"
        )


def _lost(model: nn.Module) -> Iterator[str]:
    for path, part in model.named_modules():
        of = f"of {path!r}" if path else "of the model itself"
        if names := _WRAPPERS & {cls.__name__ for cls in type(part).__mro__}:
            yield (
                f"{names.pop()} wraps {of.removeprefix('of ')}, and a plan decides what each rank "
                "holds: give the module inside, model.module, or for FSDP the one before wrapping"
            )
        if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
            yield (
                f"the code {of} is compiled by torch.compile, and cannot be seen: give the module "
                "as it was before (model._orig_mod)"
            )
        if isinstance(part, torch.jit.ScriptModule):
            yield f"the code {of} is TorchScript, and cannot be seen: give the plain module"
        if "forward" in vars(part) and (part is model or not _is_own_method(part)):
            yield (
                f"the forward method {of} was replaced in this instance alone: write a class with "
                "that forward"
            )
    if model._forward_hooks or model._forward_pre_hooks:
        yield (
            "hooks on the model itself would be lost: wrap it in a module whose forward does the "
            "same"
        )
    if model._backward_hooks or model._backward_pre_hooks:
        yield "backward hooks on the model itself would be lost: put them on a part of it"
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            yield (
                f"hooks on the gradient of {name!r} would be lost, and would see the gradient of "
                "some rows alone: clip by clip_norm or clip_value of the experiment, give weights "
                "a learning rate of their own by wb.ParameterGroup, or let forward scale them"
            )
    if hidden := _HIDING & {name for name, _ in model.named_children()}:
        yield (
            f"it has a submodule named {' and '.join(sorted(hidden))}, a name that torch.fx uses "
            "itself: rename it"
        )


def line_of_model(end: CodeType) -> Place | None:
    """The line of the model's own code at which an operation is being recorded.

    Raises:
        InsideError: the operation is under something that a graph does not record.
    """
    frame = sys._getframe()
    apply = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    line: Place | None = None
    while frame.f_back is not None and frame.f_code is not end:
        if line is None and is_users(frame.f_code.co_filename):
            line = frame.f_code, frame.f_lineno
        if frame.f_code is apply:
            raise InsideError(
                "the backward pass of a torch.autograd.Function would be lost: call its apply "
                "in a function marked by torch.fx.wrap; torch.utils.checkpoint.checkpoint has one "
                "unless use_reentrant=False, and plan.with_recompute does what it does"
            )
        frame = frame.f_back
    return line


def _is_own_method(part: nn.Module) -> bool:
    """Whether its forward is another method of its class, as `self.forward = self.forward_slow`."""
    forward = vars(part)["forward"]
    own = getattr(type(part), getattr(forward, "__name__", ""), None)
    return getattr(forward, "__self__", None) is part and forward.__func__ is own


_NONE: Mapping[str, Any] = MappingProxyType({})


class ModelFakes(FakeTensorMode):
    """The mode of a traced model's fake tensors."""

    def __init__(self, refuse: Callable[[str, str], None]) -> None:
        super().__init__()
        self._refuse = refuse
        self._names: dict[int, str] = {}  # by the memory of the model's own tensors
        self._allowed: frozenset[int] = frozenset()

    def hold(self, module: nn.Module) -> None:
        """Guards the parameters and buffers of a module, and of no other."""
        self._names = {
            memory: name
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
            for memory in memory_of([tensor])
        }

    def name_of(self, tensor: Tensor) -> str | None:
        """The name of the guarded tensor that has this tensor's memory; None: there is none."""
        (memory,) = memory_of([tensor])
        return self._names.get(memory)

    @contextmanager
    def running(self, module: nn.Module | None) -> Iterator[None]:
        """Lets a batch norm update its own statistics while it runs."""
        if not isinstance(module, _BatchNorm):
            yield
            return
        self._allowed = memory_of(module.buffers())
        try:
            yield
        finally:
            self._allowed = frozenset()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelFakes":
        return self  # of copies that a model makes of its own parts

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Mapping[str, Any] = _NONE
    ) -> Any:
        if func._schema.is_mutable:
            self._look(func, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _look(self, func: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> None:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in tensors(given):
                name = self.name_of(tensor)
                if name is not None and not memory_of([tensor]) & self._allowed:
                    self._refuse(name, str(func))
