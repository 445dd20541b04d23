"""From a torch model to a `Graph`, and back to a traced module without values."""

from dataclasses import replace
from typing import Any

import torch.fx
from torch import Tensor, nn

from workbench.model.attention import find_self_attention
from workbench.model.build import build_fake, named
from workbench.model.errors import ModelError, TraceError
from workbench.model.failure import explained
from workbench.model.independence import MixedError, constants_of, show_independence
from workbench.model.layers import layers_of
from workbench.model.packing import pack, unpack
from workbench.model.structure import structure
from workbench.model.tracer import ValueTracer
from workbench.plan.graph import Graph, Source


def trace(
    model: str | nn.Module,
    *,
    input_shape: tuple[int, ...] = (3, 32, 32),
    num_classes: int = 10,
    **arguments: Any,
) -> Graph:
    """Follows a model's forward pass in training mode, without memory for its tensors.

    Args:
        model: the name of a torchvision classification model, or any module. A module is left
            as it is; its mode, device and precision do not matter.
        input_shape: one sample's shape, (channels, height, width) for images.
        num_classes: for a name: how many classes. A module's are what it returns.
        arguments: for a name: further arguments of torchvision's builder, such as `dropout=0.1`.

    Raises:
        ModelError: an unknown name, or arguments that the builder refuses.
        TraceError: the forward pass cannot be followed; the text names the line and the remedy.
    """
    shape = _shape(input_shape)
    if isinstance(model, str):
        source = named(model, shape, {"num_classes": num_classes, **arguments})
        return _traced(source, build_fake(source), shape)[0]
    if not isinstance(model, nn.Module):
        hint = ": give an instance, not the class" if isinstance(model, type) else ""
        raise ModelError(f"a model is a torchvision name or an nn.Module, got {model!r}{hint}")
    if arguments:
        raise ModelError(
            f"{type(model).__name__} is built already: {', '.join(arguments)} cannot be given"
        )
    # torch.fx.GraphModule has properties of these names, which would hide the submodules.
    if hidden := {"code", "graph"} & {name for name, _ in model.named_children()}:
        raise TraceError(
            f"{type(model).__name__} has a submodule named {' and '.join(sorted(hidden))}, a name "
            "that torch.fx uses itself: rename it"
        )
    source = Source("module", type(model).__name__)
    graph, traced = _traced(source, structure(model), shape, constants_of(model))
    return replace(graph, source=replace(source, skeleton=pack(traced)))


def skeleton(graph: Graph) -> torch.fx.GraphModule:
    """The traced model: parameters on the meta device, one node for each layer.

    `Layer.node` is the name of a layer's node; submodules have their own names.

    Raises:
        ModelError: the model cannot be built here, or is another one than it was.
    """
    if graph.source.skeleton is not None:
        return unpack(graph.source.skeleton)
    here, traced = _traced(graph.source, build_fake(graph.source), graph.input_shape)
    if here.layers != graph.layers:
        raise ModelError(
            f"{graph.source.name} is traced here to other layers ({here.fingerprint}) than the "
            f"plan's ({graph.fingerprint}): the installed torch or torchvision differs"
        )
    return traced


def _traced(
    source: Source,
    root: nn.Module,
    input_shape: tuple[int, ...],
    constants: dict[str, Tensor] | None = None,
) -> tuple[Graph, torch.fx.GraphModule]:
    tracer = ValueTracer(input_shape)
    try:
        nodes = tracer.trace_structure(root)
        find_self_attention(nodes, root)
        show_independence(nodes, root, constants)
        layers, outputs = layers_of(root, nodes)
    except MixedError as error:
        meta = error.node.meta
        raise explained(error, source.name, meta["module"], meta["line"]) from None
    except Exception as error:
        raise explained(error, source.name, tracer.failed_in) from None
    for node in nodes.nodes:
        node.meta.clear()  # the fake values belong to this trace alone
    graph = Graph(source, input_shape, 0, layers, outputs)
    graph = replace(graph, num_classes=graph[outputs[0]].output_shape[-1])
    return graph, torch.fx.GraphModule(root, nodes, class_name=type(root).__name__)


def _shape(given: tuple[int, ...]) -> tuple[int, ...]:
    shape = tuple(given)
    if not shape or not all(isinstance(length, int) and length > 0 for length in shape):
        raise ModelError(
            f"input_shape is one sample's shape without the batch, such as (3, 32, 32), got {given}"
        )
    return shape
