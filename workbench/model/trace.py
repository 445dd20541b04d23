"""From a torch model to a `Graph`, and back to a traced module without values.

A model is traced as it trains and as it evaluates. Where both are the same operations on the same
arguments, and only modules behave differently, as batch norm and dropout do, that is one graph.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.fx
from torch import Tensor, nn
from torch.fx.node import map_arg

from workbench.model.attention import find_self_attention
from workbench.model.build import build_fake, named
from workbench.model.errors import ModelError, OperationError, TraceError
from workbench.model.failure import explained
from workbench.model.independence import constants_of, show_independence
from workbench.model.inplace import drop_unused
from workbench.model.layers import layers_of
from workbench.model.outputs import checked_roles, keep_outputs, known_roles
from workbench.model.packing import pack, unpack
from workbench.model.structure import structure
from workbench.model.tracer import ValueTracer
from workbench.plan.graph import Graph, Source


def trace(
    model: str | nn.Module,
    *,
    input_shape: tuple[int, ...] = (3, 32, 32),
    num_classes: int = 10,
    outputs: Sequence[str] | None = None,
    **arguments: Any,
) -> Graph:
    """Follows a model's forward pass, in training and in evaluation, without memory for tensors.

    Args:
        model: the name of a torchvision classification model, or any module. A module is left
            as it is; its mode, device and precision do not matter.
        input_shape: one sample's shape, (channels, height, width) for images.
        num_classes: for a name: how many classes. A module's are what it returns.
        outputs: for a module that returns several tensors: what each is for, in their order:
            "prediction" (exactly one), "auxiliary" (a head that is trained with it) or "unused".
        arguments: for a name: further arguments of torchvision's builder, such as `dropout=0.1`.

    Raises:
        ModelError: an unknown name, or arguments that the builder refuses.
        TraceError: the forward pass cannot be followed; the text names the line and the remedy.
    """
    shape = _shape(input_shape)
    if isinstance(model, str):
        source = named(model, shape, {"num_classes": num_classes, **arguments})
        if outputs is not None:
            raise ModelError(f"outputs= is for modules of your own; those of {model} are known")
        return _in_both_modes(source, build_fake(source), shape, None)[0]
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
    source, roles = Source("module", type(model).__name__), checked_roles(outputs)
    known = constants_of(model)
    graph, traced, apart = _in_both_modes(source, structure(model), shape, roles, known)
    if graph.evaluation is not None:
        there = replace(source, skeleton=pack(apart))
        graph = replace(graph, evaluation=replace(graph.evaluation, source=there))
    return replace(graph, source=replace(source, skeleton=pack(traced)))


def skeleton(graph: Graph, *, evaluating: bool = False) -> torch.fx.GraphModule:
    """The traced model: parameters on the meta device, one node for each layer.

    `Layer.node` is the name of a layer's node; submodules have their own names.

    Args:
        graph: of the model.
        evaluating: as it evaluates, the layers of `graph.evaluation`.

    Raises:
        ModelError: the model cannot be built here, or is another one than it was.
    """
    if evaluating:
        assert graph.evaluation is not None
        graph = graph.evaluation
    if graph.source.skeleton is not None:
        return unpack(graph.source.skeleton)
    root = build_fake(graph.source)
    mode = root.eval() if evaluating else root
    here, traced = _recorded(graph.source, mode, graph.input_shape).described()
    if here.layers != graph.layers:
        raise ModelError(
            f"{graph.source.name} is traced here to other layers ({here.fingerprint}) than the "
            f"plan's ({graph.fingerprint}): the installed torch or torchvision differs"
        )
    return traced


def _in_both_modes(
    source: Source,
    root: nn.Module,
    input_shape: tuple[int, ...],
    roles: tuple[str, ...] | None,
    constants: dict[str, Tensor] | None = None,
) -> tuple[Graph, torch.fx.GraphModule, torch.fx.GraphModule]:
    """The graph, and what was traced in training and in evaluation."""
    other = copy.deepcopy(root).eval()  # tracing puts modules of its own into what it traces
    training = _recorded(source, root, input_shape, roles)
    evaluating = _recorded(source, other, input_shape, roles)
    alike = _same(training.nodes, evaluating.nodes)
    graph, traced = training.described(constants)
    if alike:
        return graph, traced, traced
    evaluation, apart = evaluating.described(constants)
    shapes = [g[g.outputs[0]].output_shape for g in (graph, evaluation)]
    if shapes[0] != shapes[1]:
        raise TraceError(
            f"{source.name} predicts {shapes[0]} for each sample in training and {shapes[1]} in "
            "evaluation; both are to be the same scores"
        )
    return replace(graph, evaluation=evaluation), traced, apart


def _same(one: torch.fx.Graph, other: torch.fx.Graph) -> bool:
    """Whether two graphs have the same operations on the same arguments, under the same names."""

    def described(graph: torch.fx.Graph) -> list[tuple[Any, ...]]:
        def named(node: torch.fx.Node) -> Any:
            return ("node", node.name)

        return [
            (node.name, node.op, node.target, map_arg((node.args, node.kwargs), named))
            for node in graph.nodes
        ]

    return described(one) == described(other)


@dataclass(frozen=True)
class _Recorded:
    """One mode of a model: that of its root.

    Attributes:
        source: where the model comes from.
        root: the module that was traced.
        input_shape: of one sample.
        roles: of what it returns, if they were declared.
        nodes: with their values.
        tracer: that recorded them.
    """

    source: Source
    root: nn.Module
    input_shape: tuple[int, ...]
    roles: tuple[str, ...] | None
    nodes: torch.fx.Graph
    tracer: ValueTracer

    def described(
        self, constants: dict[str, Tensor] | None = None
    ) -> tuple[Graph, torch.fx.GraphModule]:
        """The layers, after it was shown that each sample goes its own way."""
        try:
            show_independence(self.nodes, self.root, constants)
            roles = keep_outputs(self.nodes, self.roles, training=self.root.training)
            drop_unused(self.nodes, self.root)
            if self.root.training:
                self.tracer.find_trained(self.nodes, self.root)
            layers, outputs = layers_of(self.root, self.nodes)
        except OperationError as error:
            meta = error.node.meta
            raise explained(error, self.source.name, meta["module"], meta["line"]) from None
        except Exception as error:
            raise explained(error, self.source.name, None) from None
        for node in self.nodes.nodes:
            node.meta.clear()  # the fake values belong to this trace alone
        graph = Graph(self.source, self.input_shape, 0, layers, outputs, roles)
        graph = replace(graph, num_classes=graph[outputs[0]].output_shape[-1])
        name = type(self.root).__name__
        return graph, torch.fx.GraphModule(self.root, self.nodes, class_name=name)


def _recorded(
    source: Source,
    root: nn.Module,
    input_shape: tuple[int, ...],
    roles: tuple[str, ...] | None = None,
) -> _Recorded:
    tracer = ValueTracer(input_shape)
    try:
        nodes = tracer.trace_structure(root)
        find_self_attention(nodes, root, tracer.root)
    except OperationError as error:
        meta = error.node.meta
        raise explained(error, source.name, meta["module"], meta["line"]) from None
    except Exception as error:
        raise explained(error, source.name, tracer.failed_in) from None
    roles = known_roles(nodes) if source.kind == "torchvision" else roles
    return _Recorded(source, root, input_shape, roles, nodes, tracer)


def _shape(given: tuple[int, ...]) -> tuple[int, ...]:
    shape = tuple(given)
    if not shape or not all(isinstance(length, int) and length > 0 for length in shape):
        raise ModelError(
            f"input_shape is one sample's shape without the batch, such as (3, 32, 32), got {given}"
        )
    return shape
