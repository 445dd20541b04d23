"""Builds the module of a `Source`, with values or on the meta device, and packs it for engines.

The structure of a module has the same classes, names and shapes, and no memory for tensors: they
are on torch's meta device. Floating-point ones are float32, whatever precision the module was given
in: precision belongs to the experiment, not to the model.

A packed module is sent to the engines of this session, never to a file. Its nodes and submodules
are packed, not its source: an engine needs neither the module's class nor functions that a notebook
marked by `torch.fx.wrap`. Nodes are packed one by one, since `torch.fx.Graph` is pickled
recursively, and many nodes exceed Python's recursion limit.
"""

import copy
import inspect
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from workbench.model.errors import ModelError, TraceError
from workbench.model.vision import torchvision
from workbench.plan.extension.sealed import loads
from workbench.plan.graph.graph import Source
from workbench.plan.io.errors import unknown


def named(name: str, input_shape: tuple[int, ...], arguments: dict[str, Any]) -> Source:
    """The source of a torchvision model, its arguments completed and checked.

    Raises:
        ModelError: an unknown model (the nearest are suggested), or arguments that are not plain
            values.
    """
    chosen = dict(arguments)
    accepted = _parameters(_builder(name))
    if "image_size" in accepted:
        chosen.setdefault("image_size", input_shape[-2])
    if "input_size" in accepted:
        chosen.setdefault("input_size", input_shape[-2:])
    if "weights" in chosen:
        raise ModelError(
            "weights= is not taken here: build the module with its weights, and trace that module"
        )
    values = tuple((key, _value(key, value)) for key, value in sorted(chosen.items()))
    return Source("torchvision", name, values)


def build(source: Source) -> nn.Module:
    """Builds the model with torch's own initial values, drawn from torch's global generator.

    Raises:
        ModelError: an unknown name or argument, or the source is a user's module: its values are in
            the module alone.
    """
    if source.kind != "torchvision":
        raise ModelError(
            f"{source.name} is a module of your own: its values are in the module, "
            "and cannot be built from a name"
        )
    return _torchvision_model(source)


def build_fake(source: Source) -> nn.Module:
    """Builds the model's structure, in training mode, with parameters on the meta device.

    Raises:
        ModelError: the causes of `build`; or a user's module whose structure is not available.
    """
    if source.kind == "torchvision":
        with _WithoutMemory():
            return structure(_torchvision_model(source))
    if source.skeleton is None:
        raise ModelError(
            f"{source.name} is a module of your own, and text does not hold its structure: "
            "trace the module again, and give the graph along with the text"
        )
    return unpack(source.skeleton)


def structure(module: nn.Module) -> nn.Module:
    """A copy of `module` for training, without values; the module itself is unchanged.

    Parameters stay parameters, whether they require a gradient or not. The copy is in training
    mode, except for the parts that stay in eval mode while the model trains: those that `train()`
    puts there, and, in a module that is given in training mode, those that are there already.

    Raises:
        TraceError: a parameter has no shape yet, a tensor is sparse, or is float64 where another is
            not; or the module cannot be copied.
    """

    def without_values(tensor: Tensor) -> Tensor:
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=dtype, device="meta")

    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise TraceError(
                f"{name!r} of {type(module).__name__} has no shape yet; "
                "run the module once on a batch, so that its lazy layers know their sizes"
            )
        if tensor.layout != torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            raise TraceError(
                f"{name!r} of {type(module).__name__} is {layout}, and what a model holds is kept "
                "in files and divided as dense tensors: register it dense, tensor.to_dense()"
            )
    _of_one_precision(module)
    evaluating = [path for path, part in module.named_modules() if not part.training]
    made = with_tensors(module, without_values).train()
    for path in evaluating if module.training else ():
        made.get_submodule(path).training = False
    return made


def _of_one_precision(module: nn.Module) -> None:
    """Checks that the experiment's precision can be that of all tensors.

    Raises:
        TraceError: some are float64, and others are not.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    double = [name for name, held in named if held.dtype == torch.float64]
    other = [n for n, held in named if held.is_floating_point() and held.dtype != torch.float64]
    if double and other:
        raise TraceError(
            f"{double[0]!r} of {type(module).__name__} is float64, and {other[0]!r} is not: an "
            "experiment has one precision for all of them, precision='fp32' or 'fp64', and starts "
            f"from float32. Make {double[0]!r} float32, too, by .float()"
        )


def with_tensors(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """A deep copy of `module` in which `make` replaces each tensor.

    Tensors used twice stay one. Parameters that required a gradient still do.

    Raises:
        TraceError: the module cannot be copied.
    """
    memo: dict[int, object] = {}
    for tensor in _tensors(module):
        if id(tensor) not in memo:
            made = make(tensor)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = made
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        cause = _cause(module)
        raise TraceError(f"{type(module).__name__} cannot be copied: {error}{cause}") from error


def _cause(module: nn.Module) -> str:
    """Names the attribute that keeps a module from being copied, and a remedy."""
    parts = dict(module.named_modules())
    shared = {id(held): held for held in (*parts.values(), *_tensors(module))}
    for path, part in parts.items():
        for name, value in vars(part).items():
            try:
                copy.deepcopy(value, dict(shared))
            except Exception:
                held = f"{path}.{name}".lstrip(".")
                return (
                    f". The cause is its attribute {held!r} ({type(value).__name__}): hold it in a "
                    "global or in an attribute of the class, or delete it before tracing"
                )
    return ""


def code_of(module: nn.Module) -> bytes | None:
    """Bytes that are equal only for modules that compute the same, whatever their weights are.

    None: that cannot be said, since the module holds indices, or what cannot be pickled.
    """
    if any(not (held.is_floating_point() or held.is_complex()) for held in _tensors(module)):
        return None

    def hollow(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    try:
        return bytes(cloudpickle.dumps(with_tensors(module, hollow)))
    except Exception:  # whatever it is that pickling finds
        return None


def pack(traced: GraphModule) -> bytes:
    """Packs a traced structure into bytes.

    Raises:
        TraceError: the module contains something that cannot be pickled.
    """
    submodules = nn.Module()
    for table in ("_parameters", "_buffers", "_modules"):
        getattr(submodules, table).update(getattr(traced, table))
    name = type(traced).__name__
    try:
        return zlib.compress(cloudpickle.dumps((name, submodules, _records(traced.graph))))
    except Exception as error:
        raise TraceError(
            f"{name} cannot be sent to engines, since it holds something that cannot be pickled: "
            f"{error}"
        ) from error


def unpack(packed: bytes) -> GraphModule:
    """Unpacks a structure that `pack` has packed."""
    name, submodules, records = loads(zlib.decompress(packed))
    graph = Graph()
    nodes: list[Node] = []

    def node(leaf: Any) -> Any:
        return nodes[leaf.place] if isinstance(leaf, _Reference) else leaf

    for op, target, arguments, node_name in records:
        args, kwargs = map_aggregate(arguments, node)
        nodes.append(graph.create_node(op, target, args, kwargs, node_name))
    made = GraphModule(submodules, graph, class_name=name)
    held = {path for path, _ in made.named_modules(remove_duplicate=False)}
    for path, module in submodules.named_modules(remove_duplicate=False):
        if path not in held:  # it is not called, and its weights have names
            made.add_submodule(path, module)
    return made


@dataclass(frozen=True)
class _Reference:
    """A reference to the node at this index."""

    place: int


def _records(graph: Graph) -> list[tuple[str, Any, Any, str]]:
    place = {node: _Reference(index) for index, node in enumerate(graph.nodes)}

    def reference(node: Node) -> Any:
        return place[node]

    return [
        (node.op, node.target, map_arg((node.args, node.kwargs), reference), node.name)
        for node in graph.nodes
    ]


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers, vars(owner)):
            yield from (value for value in table.values() if isinstance(value, Tensor))


# Functions that make parameters. Everything else runs as usual, since it may decide the structure:
# RegNet computes its widths with tensors, and reads them.
_MAKES_PARAMETERS = {
    torch.empty,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.rand,
    torch.randn,
}


class _WithoutMemory(TorchFunctionMode):
    """Makes parameters on the meta device, where initialising them does nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _MAKES_PARAMETERS and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _value(key: str, value: Any) -> Any:
    """A plain value that can be compared, hashed and written as text."""
    if isinstance(value, list | tuple):
        return tuple(_value(key, item) for item in value)
    if not isinstance(value, bool | int | float | str):
        raise ModelError(
            f"argument {key}={value!r} is no plain value (number, text, true or false, list): "
            "build the module yourself, and trace that module"
        )
    return value


@cache
def _models() -> tuple[str, ...]:
    models = torchvision().models
    return tuple(models.list_models(module=models))


def _builder(name: str) -> Callable[..., nn.Module]:
    if name not in _models():
        raise ModelError(unknown("model", name, _models(), of="torchvision"))
    builder: Callable[..., nn.Module] = torchvision().models.get_model_builder(name)
    return builder


def _parameters(builder: Callable[..., nn.Module]) -> set[str]:
    """The names of the arguments that the builder passes on to the model's class."""
    model = inspect.signature(builder).return_annotation
    return set(inspect.signature(model).parameters)


def _torchvision_model(source: Source) -> nn.Module:
    arguments = dict(source.arguments)
    builder = _builder(source.name)
    if "init_weights" in _parameters(builder):
        # torchvision's default, made explicit: without it GoogLeNet and Inception warn. It takes
        # 0.3 s and 0.6 s (the warning's "long initialization times" are of the past).
        arguments.setdefault("init_weights", True)
    try:
        return builder(weights=None, **arguments)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in source.arguments)
        raise ModelError(f"{source.name} cannot be built with {given}: {error}") from error
