"""The tracing of a torch model into a `Graph`, and back into a traced module without values.

A model is traced in training and in evaluation mode. If both have the same operations on the same
arguments, and only modules behave differently, as batch norm and dropout do, that is one graph.
"""

import copy
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.fx
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from workbench.model.build import build_fake, named, pack, structure, unpack
from workbench.model.errors import InsideError, ModelError, OperationError, TraceError
from workbench.model.packages import packaged
from workbench.model.record.attention import find_self_attention, masked_self_attention
from workbench.model.record.batch import MovedModule
from workbench.model.record.extended import find_linears
from workbench.model.record.failure import explained
from workbench.model.record.in_place import drop_unread_parts, drop_unused
from workbench.model.record.inputs import declared, without_objects
from workbench.model.record.layers import layers_of
from workbench.model.record.patches import modes_restored
from workbench.model.record.runs import Ran
from workbench.model.record.state import left_alone, operations, refuse_what_is_lost
from workbench.model.record.tracer import ValueTracer
from workbench.model.tracing.batch_first import put_batch_first
from workbench.model.trials.gradients import find_trained
from workbench.model.trials.independence import constants_of, show_independence
from workbench.model.trials.propagation import find_propagations
from workbench.model.trials.whole import is_small, show_same
from workbench.plan.graph.graph import ROLES, Graph, Input, Source

_STEPS = 5
_REMEDY = (
    'say what each is for: wb.trace(module, outputs=("prediction", "unused")); '
    f"roles are {', '.join(map(repr, ROLES))}"
)


@modes_restored()
def trace(
    model: str | nn.Module,
    *,
    input_shape: tuple[int, ...] = (3, 32, 32),
    num_classes: int = 10,
    outputs: Sequence[str] | Mapping[str, str] | None = None,
    vocabulary: int | None = None,
    inputs: Mapping[str, Input | tuple[int, ...]] | None = None,
    **arguments: Any,
) -> Graph:
    """Traces a model's forward pass, in training and evaluation mode, without memory for tensors.

    Args:
        model: the name of a torchvision classification model; "timm/NAME" or "transformers/TYPE",
            built by that package with random values; or any module. A module is left unchanged;
            its mode, device and precision do not matter. The graph keeps it: its values at the
            time of `train` or `verify` are the initial weights.
        input_shape: the shape of one sample, (channels, height, width) for images, (tokens,) for
            text.
        num_classes: the number of classes of a model that is given by name; a module's are those
            that it returns.
        outputs: the role of each tensor that a module returns, in order: "prediction" (exactly
            one), "auxiliary" (a head that is trained with it) or "unused"; None: it returns one
            tensor. Of a module that returns a dict: the roles by name, all others being unused.
        vocabulary: the number of tokens of a model that reads token ids (int64, from 0 to
            `vocabulary - 1`); None: the input is real numbers.
        inputs: what a module of your own reads, where that is more than one tensor, a mask, or not
            its first parameter: for each parameter of forward that gets a tensor an `Input`, or
            the shape of one sample. All other parameters have their defaults.
        arguments: the further arguments of the builder, for a name: `dropout=0.1` of torchvision's
            or timm's; `config={...}`, and `head="MaskedLM"` for another than the first that a model
            has out of CausalLM, MaskedLM and ImageClassification, of transformers'.

    Raises:
        ModelError: an unknown name, or arguments that the builder refuses.
        TraceError: the forward pass cannot be traced; the text names the line and the remedy.
    """
    samples = declared(input_shape, vocabulary, inputs)
    if isinstance(model, str) and "/" in model:
        found = packaged(model, num_classes, arguments)
        return trace(
            found.module,
            input_shape=input_shape,
            outputs=found.outputs if outputs is None else outputs,
            vocabulary=found.vocabulary if vocabulary is None and inputs is None else vocabulary,
            inputs=inputs,
        )
    if isinstance(model, str):
        source = named(model, samples[0].shape, {"num_classes": num_classes, **arguments})
        if outputs is not None or vocabulary is not None or inputs is not None:
            raise ModelError(
                f"outputs=, vocabulary= and inputs= are for modules of your own; those of {model} "
                "are known"
            )
        return _with_skeletons(*_in_both_modes(source, build_fake(source), samples, None))
    if not isinstance(model, nn.Module):
        hint = ": give an instance, not the class" if isinstance(model, type) else ""
        raise ModelError(f"a model is a torchvision name or an nn.Module, got {model!r}{hint}")
    if arguments:
        raise ModelError(
            f"{type(model).__name__} is built already: {', '.join(arguments)} cannot be given"
        )
    refuse_what_is_lost(model)
    named_parameters = model.named_parameters(remove_duplicate=False)
    frozen = frozenset(name for name, parameter in named_parameters if not parameter.requires_grad)
    source = Source("module", type(model).__name__, frozen=frozen)
    roles = checked_roles(outputs)
    known = constants_of(model)
    with left_alone(model):
        graph, traced, apart = _in_both_modes(source, structure(model), samples, roles, known)
    if is_small(graph):
        show_same(graph, model, traced, apart, partial(_with_role, roles))
    graph = _with_skeletons(graph, traced, apart)
    return replace(graph, source=replace(graph.source, module=model))


def show_trains_same(graph: Graph) -> None:
    """Checks that a module and its graph stay the same through some training steps.

    Raises:
        TraceError: the module computes something else.
    """
    module = graph.source.module
    if module is None:
        return
    traced = skeleton(graph)
    apart = traced if graph.evaluation is None else skeleton(graph, evaluating=True)
    steps = _STEPS if is_small(graph) else 1
    show_same(graph, module, traced, apart, partial(_with_role, graph.roles), steps=steps)


def _with_skeletons(
    graph: Graph, traced: torch.fx.GraphModule, apart: torch.fx.GraphModule
) -> Graph:
    """The graph with what was traced: no engine needs to do so again, which takes seconds."""
    if graph.evaluation is not None:
        there = replace(graph.source, skeleton=pack(apart))
        graph = replace(graph, evaluation=replace(graph.evaluation, source=there))
    return replace(graph, source=replace(graph.source, skeleton=pack(traced)))


@modes_restored()
def skeleton(graph: Graph, *, evaluating: bool = False) -> torch.fx.GraphModule:
    """The traced model: parameters on the meta device, one node for each layer.

    `Layer.node` is the name of a layer's node; submodules have their own names.

    Raises:
        ModelError: the model cannot be built here, or differs from the one that was traced.
    """
    training = graph
    if evaluating:
        assert graph.evaluation is not None
        graph = graph.evaluation
    if graph.source.skeleton is not None:
        return unpack(graph.source.skeleton)
    root = build_fake(graph.source)
    mode = root.eval() if evaluating else root
    here, traced = _recorded(graph.source, mode, graph.inputs).described()
    if evaluating:
        here = _in_units_of(training, here)
    if here.layers != graph.layers:
        raise ModelError(
            f"{graph.source.name} is traced here to other layers ({here.fingerprint}) than the "
            f"plan's ({graph.fingerprint}): the installed torch or torchvision differs"
        )
    return traced


def _in_both_modes(
    source: Source,
    root: nn.Module,
    samples: tuple[Input, ...],
    roles: "Roles | None",
    constants: dict[str, Tensor] | None = None,
) -> tuple[Graph, torch.fx.GraphModule, torch.fx.GraphModule]:
    """The graph, and the modules traced in training and in evaluation mode."""
    other = copy.deepcopy(root).eval()  # tracing adds modules to the traced one
    known: dict[Hashable, Ran] = {}
    training = _recorded(source, root, samples, roles, known)
    evaluating = _recorded(source, other, samples, roles, known)
    alike = training.operations() == evaluating.operations()
    graph, traced = training.described(constants)
    if alike:
        _refuse_unread(graph)
        return graph, traced, traced
    evaluation, apart = evaluating.described(constants)
    shapes = [g[g.outputs[0]].output_shape for g in (graph, evaluation)]
    if shapes[0] != shapes[1]:
        raise TraceError(
            f"{source.name} predicts {shapes[0]} for each sample in training and {shapes[1]} in "
            "evaluation; both are to be the same scores"
        )
    graph = replace(graph, evaluation=_in_units_of(graph, evaluation))
    _refuse_unread(graph)
    return graph, traced, apart


def _in_units_of(training: Graph, evaluation: Graph) -> Graph:
    """The graph of evaluation, whose weights are in the pieces that training has them in."""
    units = {
        layer.name: (layer.output_units, layer.output_blocks, layer.input_units)
        for layer in training.layers
        if layer.kind == "linear"
    }
    layers = []
    for layer in evaluation.layers:
        if layer.kind == "linear":
            out, blocks, into = units.get(layer.name, (0, 1, 0))
            layer = replace(layer, output_units=out, output_blocks=blocks, input_units=into)
        layers.append(layer)
    return replace(evaluation, layers=tuple(layers))


def _refuse_unread(graph: Graph) -> None:
    """Checks that a layer reads each named input, in training or in evaluation."""
    modes = (graph,) if graph.evaluation is None else (graph, graph.evaluation)
    for source, one in graph.sources.items():
        if one.name and not any(mode.consumers[source] for mode in modes):
            raise TraceError(
                f"{graph.source.name}: nothing that is returned depends on {one.name!r}, which is "
                "declared as an input: leave it out"
            )


@dataclass(frozen=True)
class _Recorded:
    """A model recorded in one mode, that of its root."""

    source: Source
    root: nn.Module
    samples: tuple[Input, ...]
    roles: "Roles | None"
    nodes: torch.fx.Graph
    tracer: ValueTracer
    refused: TraceError | None = None

    def operations(self) -> list[tuple[Any, ...]]:
        """Each operation with its name and arguments, and where its module has the batch."""
        nodes = self.nodes.nodes
        return [
            (*operation, self._inside(node))
            for operation, node in zip(operations(self.nodes), nodes, strict=True)
        ]

    def _inside(self, node: Node) -> tuple[Any, ...]:
        module = self.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        return (module.into, module.out) if isinstance(module, MovedModule) else ()

    def described(
        self, constants: dict[str, Tensor] | None = None
    ) -> tuple[Graph, torch.fx.GraphModule]:
        """The graph and the traced module, after checking that samples are independent.

        Raises the explained `TraceError` of an operation that is refused.
        """
        try:
            inputs = dict(zip(self.tracer.inputs, self.samples, strict=True))
            known = show_independence(self.nodes, self.root, constants, inputs)
            roles, keys = keep_outputs(self.nodes, self.roles, training=self.root.training)
            drop_unused(self.nodes, self.root)
            if self.root.training:
                find_trained(self.nodes, self.root, self.tracer)
            find_propagations(self.nodes, known)
            layers, outputs = layers_of(self.root, self.nodes)
        except OperationError as error:
            if self.refused is not None and self._is_whole(error.node):
                raise self.refused from None
            meta = error.node.meta
            raise explained(error, self.source.name, meta["module"], meta["line"]) from None
        except Exception as error:
            raise explained(error, self.source.name, None) from None
        for node in self.nodes.nodes:
            node.meta.clear()  # the fake values belong to this trace alone
        graph = Graph(self.source, self.samples, 0, layers, outputs, roles)
        classes = graph[outputs[0]].output_shape[-1]
        least = self.tracer.least_batch
        graph = replace(graph, num_classes=classes, least_batch=least, keys=keys)
        name = type(self.root).__name__
        traced = torch.fx.GraphModule(self.root, self.nodes, class_name=name)
        self._add_unread_names(graph, traced)
        return graph, traced

    def _is_whole(self, node: Node) -> bool:
        if node.op != "call_module":
            return False
        return type(self.root.get_submodule(str(node.target))) in self.tracer.whole

    def _add_unread_names(self, graph: Graph, traced: torch.fx.GraphModule) -> None:
        """Adds the modules whose weights are read only as those of others that they are tied to."""
        held = {path for path, _ in traced.named_modules(remove_duplicate=False)}
        for layer in graph.layers:
            for weight in layer.weights:
                for alias in weight.aliases:
                    path, _, _ = alias.rpartition(".")
                    if path not in held:
                        traced.add_submodule(path, self.root.get_submodule(path))


def _recorded(
    source: Source,
    root: nn.Module,
    samples: tuple[Input, ...],
    roles: "Roles | None" = None,
    known: dict[Hashable, Ran] | None = None,
) -> _Recorded:
    tracer, refused = ValueTracer(samples, known=known), None
    while True:
        try:
            nodes = tracer.trace_structure(root)
            if masked := masked_self_attention(nodes, tracer.root) - tracer.written_out:
                tracer = tracer.again(written_out=tracer.written_out | masked)
                continue
            tracer.extended.put(root, tracer.root)
            find_linears(nodes, (root, tracer.root), tracer.record)
            drop_unread_parts(nodes)
            if any(node.meta.get("elsewhere") for node in nodes.nodes):
                put_batch_first(nodes, (root, tracer.root), tracer.record)
            find_self_attention(nodes, root, tracer.root)
            break
        except OperationError as error:
            meta = error.node.meta
            raise explained(error, source.name, meta["module"], meta["line"]) from None
        except Exception as error:
            cause, path = error, tracer.failed_in
            if tracer.refused is not None:  # the model's own code made another error of it
                cause, path = tracer.refused
            found = explained(cause, source.name, path)
            around = root.get_submodule(path) if path else None
            refused = refused or found
            if not isinstance(cause, InsideError) or around is None or type(around) in tracer.whole:
                raise refused from None
            tracer = tracer.again(whole={*tracer.whole, type(around)})
    roles = known_roles(nodes) if source.kind == "torchvision" else roles
    return _Recorded(source, root, samples, roles, nodes, tracer, refused)


Roles = tuple[str, ...] | dict[str, str]
"""The roles of what a model returns: in order, or by name."""


def checked_roles(given: Sequence[str] | Mapping[str, str] | None) -> Roles | None:
    """The declared roles of a model's outputs; None: nothing was declared.

    Raises:
        ModelError: an unknown role, or not exactly one prediction.
    """
    if given is None:
        return None
    named = dict(given) if isinstance(given, Mapping) else {}
    roles = tuple(named.values() if named else (given,) if isinstance(given, str) else given)
    if any(role not in ROLES for role in roles) or roles.count("prediction") != 1:
        raise ModelError(
            f"outputs says what each returned tensor is for, one of {', '.join(map(repr, ROLES))}, "
            f"and exactly one is the prediction; got {given!r}"
        )
    return named or roles


def known_roles(graph: torch.fx.Graph) -> tuple[str, ...]:
    """The roles of torchvision's classifiers: the prediction, then auxiliary heads."""
    returned = next(node for node in graph.nodes if node.op == "output").args[0]
    listed = returned if isinstance(returned, list | tuple) else [returned]
    count = sum(item is not None for item in listed)
    return ("prediction", *["auxiliary"] * (count - 1))


def keep_outputs(
    graph: torch.fx.Graph, roles: Roles | None, *, training: bool = True
) -> tuple[tuple[str, ...], tuple[int | str, ...]]:
    """Makes a traced graph return what is trained on: the prediction first, then auxiliary heads.

    Returns:
        The role of each tensor that the model returns, and `Graph.keys`.

    Raises:
        TraceError: the model returns something else than tensors of one row for each sample, or
            others than were declared.
    """
    output = next(node for node in graph.nodes if node.op == "output")
    names = roles if isinstance(roles, dict) else {}
    returned, found, roles = _returned(output.args[0], roles, training=training)
    if not found:
        raise TraceError("the model returns nothing")
    for item in found:
        if not isinstance(item, Node) or not isinstance(item.meta["values"][0], Tensor):
            raise TraceError(
                f"the model returns {_described(returned)}; return the predictions, one "
                "tensor, or a tuple or dict of tensors and say what each is for: "
                'outputs={"logits": "prediction"}'
            )
    if len(found) != len(roles):
        shapes = ", ".join(str(item.meta["shape"]) for item in found)
        declared = f"{len(roles)} declared" if len(roles) > 1 else "nothing says which is trained"
        raise TraceError(
            f"the model returns {len(found)} tensors, of shapes {shapes} for each sample, and "
            f"{declared}: {_REMEDY}"
        )
    chosen = _chosen(found, roles)
    for item in chosen:
        if item.op == "placeholder" or item.meta["rows"] != 1 or not item.meta["shape"]:
            raise TraceError(
                f"the model returns {item.name!r}, which has {item.meta['rows']} rows of shape "
                f"{item.meta['shape']} for each sample; a prediction has one row, of one dimension "
                "or more: of one number it is [rows, 1], and the loss can take the last one off"
            )
    if chosen != found or not isinstance(output.args[0], list | tuple):
        output.args = (tuple(chosen) if len(chosen) > 1 else chosen[0],)
    return roles, _keys(roles, names)


def _returned(
    returned: Any, roles: Roles | None, *, training: bool
) -> tuple[Any, list[Any], tuple[str, ...]]:
    """What a model returns: of a dict what is named, each of it that is something, and its role."""
    if isinstance(roles, dict):
        returned, roles = _of_names(returned, roles)
    listed = returned if isinstance(returned, list | tuple) else [returned]
    found = [item for item in listed if item is not None]
    if roles is None or (not training and len(found) == 1):
        roles = ("prediction",)
    return returned, found, roles


def _chosen(found: Sequence[Any], roles: tuple[str, ...]) -> list[Any]:
    """What is trained on: the prediction first."""
    pairs = list(zip(found, roles, strict=True))
    return [item for role in ROLES[:2] for item, own in pairs if own == role]


def _keys(roles: tuple[str, ...], names: Mapping[str, str]) -> tuple[int | str, ...]:
    """The `Graph.keys` of tensors with these roles; `names` are those of a dict, if it is one."""
    if names:
        return tuple(_chosen([*names], roles))
    used = [place for place, role in enumerate(roles) if role != "unused"]
    places = [used.index(place) for place in _chosen(range(len(roles)), roles)]
    return () if places == sorted(places) else tuple(places)


def _with_role(roles: Roles | None, returned: Any, training: bool) -> list[Any]:
    """What a graph returns of what its module does."""
    _, found, own = _returned(without_objects(returned), roles, training=training)
    return _chosen(found, own)


def _of_names(returned: Any, roles: dict[str, str]) -> tuple[Any, tuple[str, ...]]:
    """The returned values that have a role, and their roles.

    Raises:
        TraceError: the model returns no dict, or one without them.
    """
    if not isinstance(returned, dict):
        raise TraceError(
            f"outputs gives roles by name ({', '.join(roles)}), and the model returns "
            f"{_described(returned)}; give the roles in order"
        )
    if missing := [name for name in roles if returned.get(name) is None]:
        raise TraceError(
            f"the model returns {_described(returned)}; outputs names {', '.join(missing)} too"
        )
    return tuple(returned[name] for name in roles), tuple(roles.values())


def _described(returned: Any) -> str:
    if isinstance(returned, dict):
        return f"a dict with {', '.join(map(repr, returned))}"
    kinds = {type(leaf).__name__ for leaf in pytree.tree_leaves(returned)}
    return f"a {type(returned).__name__} of {', '.join(sorted(kinds))}"
