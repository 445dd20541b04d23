"""Applies a plan to a whole model: one rank's part of it, and the way back to the whole."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.node import map_aggregate
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._device import _device_constructors

from workbench.layers.cut_model import CutModel, RankGroups, input_node
from workbench.layers.local.attention import called_again, heads_layout, local_attention
from workbench.layers.local.context import BatchContext
from workbench.layers.local.convert import ConvertLayout
from workbench.layers.local.draws import Drawn, PlacedDropout, called
from workbench.layers.local.embedding import local_embedding
from workbench.layers.local.idle import Idle, LayerDtypes, OutputType
from workbench.layers.local.local import held, idles, local_module, read_pieces
from workbench.layers.local.norms import (
    LocalBatchNorm,
    RunningShare,
    SynchronizedBatchNorm,
    batch_norm,
    guard,
    instance_norm,
)
from workbench.layers.looked_at import LookedAt, LookedAtFunction, look_at_module
from workbench.model.record.batch import Changed, is_users_function, operation_of
from workbench.model.record.draws import Held
from workbench.model.record.in_place import named_in_place
from workbench.model.record.python_state import is_own
from workbench.model.tracing.trace import skeleton
from workbench.model.trials.propagation import with_pieces
from workbench.model.weights.slices import Reader
from workbench.plan.graph.graph import Layer
from workbench.plan.placement.placement import ROWS, Conversion, Shard, replica_group, shard_group
from workbench.plan.plans.plan import Plan

_IN_ORDER: dict[Any, Any] = {F.batch_norm: batch_norm, F.instance_norm: instance_norm}
# Their outputs may lie in the memory of their inputs.
_VIEWS = ("flatten", "op", "elementwise")


def cut(
    plan: Plan,
    context: BatchContext,
    groups: RankGroups,
    reader: Reader,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    traced: torch.fx.GraphModule | None = None,
) -> CutModel:
    """Rewrites the traced model for one rank, reading only this rank's slices.

    Args:
        context: the batch context of this rank; its `rank` is the rank to cut for.
        reader: the weights, whole or in pieces of any other plan.
        dtype: the type of floating-point weights; None: that in which they were saved.
        traced: the graph's `skeleton`, to be rewritten; None: the model is built and traced anew.

    Source: the rewriting of SplitBrain (arXiv:2112.15317), with conversions as explicit nodes.
    """
    traced = skeleton(plan.graph) if traced is None else traced
    return _Cutting(plan, context, groups, traced).apply(reader, device, dtype)


def evaluating(model: CutModel) -> CutModel:
    """Returns a cut model as it evaluates, on the very same pieces of weights.

    That is the model itself, unless it takes another way in evaluation than in training.
    """
    plan = model.plan.evaluation
    if plan is model.plan:
        return model
    traced, held = skeleton(model.plan.graph, evaluating=True), HeldPieces(model.pieces())
    return cut(plan, model.context, model.groups, held, device=held.device, traced=traced)


class HeldPieces:
    """Pieces that this rank holds already, read as they lie."""

    def __init__(self, pieces: Mapping[str, Tensor]) -> None:
        self._pieces = pieces
        self.names = tuple(pieces)
        self.device = next((piece.device for piece in pieces.values()), torch.device("cpu"))

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a piece."""
        return tuple(self._pieces[name].shape)

    def read(self, name: str, shard: Shard | None = None, rank: int = 0) -> Tensor:
        """Returns this rank's piece; its memory is shared with its owner."""
        return self._pieces[name].detach()


class _Cutting:
    def __init__(
        self, plan: Plan, context: BatchContext, groups: RankGroups, traced: torch.fx.GraphModule
    ) -> None:
        self.plan, self.graph, self.flow = plan, plan.graph, plan.flow
        self.context, self.groups, self.rank = context, groups, context.rank
        self.traced = traced
        self.nodes = {node.name: node for node in self.traced.graph.nodes}
        # Of operations that must not write into their input: what readers read instead of the node,
        # and what reads the input instead of it.
        self.typed: dict[torch.fx.Node, torch.fx.Node] = {}
        self.copied: dict[torch.fx.Node, torch.fx.Node] = {}
        self.steps: dict[tuple[str, tuple[Conversion, ...]], torch.fx.Node] = {}
        self.dtypes: LayerDtypes | None = None
        types = set[str]()  # and numbers that are made of types alone, such as the least of one
        for one in self.graph.layers:
            if one.of_type or (one.kind == "size" and one.inputs and types.issuperset(one.inputs)):
                types.add(one.name)
        sizes = (one for one in self.graph.layers if one.kind == "size" and one.name not in types)
        self._sizes = {self.nodes[one.node] for one in sizes}

    def apply(self, reader: Reader, device: torch.device, dtype: torch.dtype | None) -> CutModel:
        layers, flow, rank = self.graph.layers, self.flow, self.rank
        if device.type != "cpu":
            self._made_on(device)
        read = [read_pieces(layer, flow, rank, reader, device, dtype) for layer in layers]
        if any(self._has_nothing_of(layer) for layer in layers):
            every = (piece for pieces in read for piece in pieces.values())
            saved = next((p.dtype for p in every if p.is_floating_point()), torch.float32)
            self.dtypes = LayerDtypes(self.traced, self.graph.inputs, device, saved)
        for layer, pieces in zip(layers, read, strict=True):
            self._place(layer, pieces)
            self._tie(layer)  # before those that it is tied to, which have its sizes
        for layer in self.graph.layers:
            self._place_draws(layer)
            self._connect(layer)
        self._return()
        if device.type != "cpu":
            self._called_on(device)
        self.traced.graph.eliminate_dead_code()
        self.traced.graph.lint()
        self.traced.recompile()
        return CutModel(self.traced, self.plan, self.context, self.groups)

    def _made_on(self, device: torch.device) -> None:
        """Lets what the model makes lie on the device that it computes on, unless it says where."""
        makers = _device_constructors()
        for node in self.traced.graph.nodes:
            if node.op == "call_function" and operation_of(node) in makers:
                if node.kwargs.get("device") is None:
                    node.update_kwarg("device", device)

    def _called_on(self, device: torch.device) -> None:
        """The same of what the code of modules makes that were not traced into."""
        ops = [self._module(self.nodes[one.node]) for one in self.graph.layers if one.kind == "op"]
        for module in dict.fromkeys(ops):  # one may be called several times
            if module is not None:
                _make_there(module, device)

    def _place(self, layer: Layer, pieces: dict[str, Tensor]) -> None:
        """Puts this rank's part of one layer where the whole layer stood."""
        if layer.kind == "parameter":
            for weight in layer.weights:
                piece = pieces[weight.name]
                if weight.trainable or weight.frozen:
                    piece = nn.Parameter(piece, requires_grad=weight.trainable)
                _set_tensor(self.traced, weight.name, piece)
            return
        node = self.nodes[layer.node]
        module = self._module(node)
        idle = idles(layer, self.flow, self.rank)
        if layer.kind in ("dropout", "stochastic_depth"):
            placed = self._dropout(layer, node, module)
            self._call(node, f"{layer.node}_placed", placed, node.all_input_nodes[:1])
        elif idle and not layer.weights:
            self._call(node, f"{layer.node}_idle", self._idle(layer, None), self._read(layer, node))
        elif module is not None and self._placed_before(layer):
            if layer.kind == "attention" and layer.random:
                self._call(
                    node, f"{layer.node}_call", called_again(module, layer), node.all_input_nodes
                )
        elif module is not None:
            local = self._local(module, layer, pieces)
            if layer.kind == "batch_norm":
                local = self._batch_norm(layer, local)
            elif layer.kind == "attention":
                local = self._attention(layer, local)
            elif layer.kind == "embedding":
                local = local_embedding(local, layer, self.plan.layers.get(layer.name), self.rank)
            elif isinstance(local, _NormBase):
                guard(local)
            if getattr(local, "inplace", False) and self._leaves_input(layer):
                cast(Any, local).inplace = False
            if idle:
                local = self._idle(layer, local)
            elif layer.kind == "op" and _is_own(local) and self._has_halves(layer, node):
                look_at_module(local, self._look(layer, node))
            if layer.kind in ("batch_norm", "linear"):  # parts of it are layers of their own
                for name, part in module.named_children():
                    local.add_module(name, part)
            node.target = self._own_path(layer, node)
            self.traced.set_submodule(str(node.target), local)
        elif node.op in ("call_function", "call_method"):
            self._function(layer, node)

    def _read(self, layer: Layer, node: torch.fx.Node) -> list[torch.fx.Node]:
        """Returns what a node reads, first what has the rows of the batch."""
        of_batch = {self._node(name) for name in layer.inputs if self.graph.rows_of(name)}
        return sorted(node.all_input_nodes, key=lambda one: one not in of_batch)

    def _local(self, module: nn.Module, layer: Layer, pieces: dict[str, Tensor]) -> nn.Module:
        choice = self.plan.layers.get(layer.name)
        return local_module(module, layer, self.flow, self.rank, pieces, choice)

    def _own_path(self, layer: Layer, node: torch.fx.Node) -> str:
        """Returns the path at which the module of this call stands.

        A module without weights that is called several times need not be the same in all calls:
        in one of them its input may be whole, in another this rank may have nothing of it.
        """
        path = str(node.target)
        callers = [n for n in self.nodes.values() if n.op == "call_module" and n.target == path]
        return path if layer.weights or len(callers) == 1 else f"{layer.node}_call"

    def _placed_before(self, layer: Layer) -> bool:
        """Returns whether it is a further call of a module that stands in its place already."""
        if not layer.shared:
            return False
        return self.nodes[layer.node].target == self.nodes[self.graph[layer.shared].node].target

    def _tie(self, layer: Layer) -> None:
        """Gives a tied weight to every module that has it."""
        for weight in (weight for weight in layer.weights if weight.aliases):
            owner, _, leaf = weight.name.rpartition(".")
            module = self.traced.get_submodule(owner)
            tensor = getattr(module, leaf, None)
            if tensor is None:  # a bias that another rank adds
                tensor = getattr(module, f"unused_{leaf}")
            for alias in weight.aliases:
                _set_tensor(self.traced, alias, tensor)

    def _function(self, layer: Layer, node: torch.fx.Node) -> None:
        node.target = _IN_ORDER.get(node.target, node.target)
        if layer.name in self.flow.ways:
            way, counts = self.flow.ways[layer.name]
            with_pieces(node, way.scaled, counts[self.rank % len(counts)], way.pieces)
        if self._leaves_input(layer):
            if node.kwargs.get("inplace"):
                node.update_kwarg("inplace", False)
            plain = _out_of_place(node)
            if plain != node.target and layer.draws:
                self._on_a_copy(node)
            elif plain != node.target:
                node.target = plain
                self._keep_type(node)
        if is_users_function(node.target) and self._has_halves(layer, node):
            function = LookedAtFunction(called(self.traced, node), self._look(layer, node))
            self._call(node, f"{layer.node}_looked_at", function, node.args, node.kwargs)

    def _has_halves(self, layer: Layer, node: torch.fx.Node) -> bool:
        """Returns whether it can be called with a half of the rows; a size is that of all."""
        return layer.rows > 0 and not layer.random and self._sizes.isdisjoint(node.all_input_nodes)

    def _look(self, layer: Layer, node: torch.fx.Node) -> LookedAt:
        """Returns what looks at the calls of a layer in the user's own code."""
        rows = {self._node(name): self.graph.rows_of(name) for name in layer.inputs}

        def of(leaf: Any) -> int:
            return rows.get(leaf, 0) if isinstance(leaf, torch.fx.Node) else 0

        return LookedAt(layer, map_aggregate((node.args, dict(node.kwargs)), of))

    def _on_a_copy(self, node: torch.fx.Node) -> None:
        """Lets an operation in place change a copy: out of place, torch draws other numbers."""
        with self.traced.graph.inserting_before(node):
            copied = self.traced.graph.call_method("clone", node.args[:1])
        node.args = (copied, *node.args[1:])
        self.copied[node] = copied

    def _keep_type(self, node: torch.fx.Node) -> None:
        """Gives a result the type of what it would have been written into."""
        with self.traced.graph.inserting_after(node):
            typed = self.traced.graph.call_method("type_as", (node, node.args[0]))
        node.replace_all_uses_with(typed, delete_user_cb=lambda user: user is not typed)
        self.typed[node] = typed

    def _place_draws(self, layer: Layer) -> None:
        """Lets what a layer draws depend on nothing but the places of its elements."""
        if not layer.random or layer.kind in ("dropout", "stochastic_depth", "attention"):
            return
        node = self.nodes[layer.node]
        group_size = self.flow.inputs[layer.name].group_size
        held = self._held_of_draws(layer)
        drawn = Drawn(called(self.traced, node), layer, group_size, self.context, held)
        self._call(node, f"{layer.node}_drawn", drawn, node.args, node.kwargs)

    def _held_of_draws(self, layer: Layer) -> Held | None:
        if layer.name not in self.flow.ways:
            return None
        way, counts = self.flow.ways[layer.name]
        member = self.rank % len(counts)
        return Held(way.drawn, sum(counts[:member]), counts[member], way.pieces)

    def _leaves_input(self, layer: Layer) -> bool:
        """Returns whether this layer must not write into its input.

        It must not where anything that reads that input, or what lies in its memory, gets it
        through a conversion, or where a segment that is recomputed computes it or reads it.
        """
        segments = {name for segment in self.plan.segments for name in segment}
        readers = self.graph.consumers
        return any(
            name in segments
            or not segments.isdisjoint(readers[name])
            or any(self.flow.edges[name, reader] for reader in readers[name])
            for name in self._alike(layer.inputs)
        )

    def _alike(self, names: Sequence[str]) -> set[str]:
        """Returns the layers, and those that may be views of them or of which they may be."""
        found: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name in found:
                continue
            found.add(name)
            waiting += [r for r in self.graph.consumers[name] if self.graph[r].kind in _VIEWS]
            if name not in self.graph.sources and self.graph[name].kind in _VIEWS:
                waiting += self.graph[name].inputs
        return found

    def _module(self, node: torch.fx.Node) -> nn.Module | None:
        return self.traced.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _dropout(
        self, layer: Layer, node: torch.fx.Node, module: nn.Module | None
    ) -> PlacedDropout:
        def argument(name: str, position: int, default: Any) -> Any:
            if module is not None:
                return getattr(module, name, default)
            return node.kwargs.get(
                name, node.args[position] if len(node.args) > position else default
            )

        mode = "element"
        if layer.kind == "stochastic_depth":
            mode = argument("mode", 2, "row")
        p = float(argument("p", 1, 0.5))
        layout = self.flow.inputs[layer.name]
        shape, always = layer.input_shape, module is None
        return PlacedDropout(
            p, layout, shape, layer.rows, layer.name, self.context, mode, always=always
        )

    def _has_nothing_of(self, layer: Layer) -> bool:
        """Returns whether this rank has no element of a layer, or no head of an attention."""
        heads = heads_layout(self.plan, layer) if layer.kind == "attention" else ROWS
        cut, member = heads.placement, self.rank % heads.group_size
        headless = isinstance(cut, Shard) and cut.sizes[member] == 0
        return headless or idles(layer, self.flow, self.rank)

    def _output_type(self, layer: Layer) -> OutputType | None:
        """Returns the type of a layer's output, where this rank has nothing of some layer."""
        return None if self.dtypes is None else partial(self.dtypes.of, layer.node)

    def _idle(self, layer: Layer, local: nn.Module | None) -> Idle:
        shape = held(layer.output_shape, self.flow.outputs[layer.name], self.rank)
        return Idle(
            local, shape, self._output_type(layer), learns=layer.name in self.graph.learning
        )

    def _attention(self, layer: Layer, local: nn.Module) -> nn.Module:
        heads = heads_layout(self.plan, layer)
        cut = isinstance(heads.placement, Shard)
        group = self.groups["shard", shard_group(self.rank, heads.group_size)] if cut else None
        return local_attention(local, layer, heads, self.context, group, self._output_type(layer))

    def _batch_norm(self, layer: Layer, norm: Any) -> nn.Module:
        group_size = self.flow.inputs[layer.name].group_size
        if not self.plan.synchronizes(layer):
            return LocalBatchNorm(norm, RunningShare(self.context, group_size))
        ranks = replica_group(self.rank, group_size, self.plan.world_size)
        return SynchronizedBatchNorm(norm, self.groups["norm", ranks], layer=layer.name)

    def _call(
        self,
        node: torch.fx.Node,
        path: str,
        module: nn.Module,
        inputs: Sequence[Any],
        named: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Replaces a node's operation by a call of `module` on `inputs` and on `named` ones."""
        self.traced.add_submodule(path, module)
        node.op, node.target = "call_module", path
        node.args, node.kwargs = tuple(inputs), dict(named)

    def _connect(self, layer: Layer) -> None:
        """Puts the conversions between a layer and what it reads."""
        if not layer.inputs:
            return
        node = self.nodes[layer.node]
        for name in dict.fromkeys(layer.inputs):
            steps = self.flow.edges[name, layer.name]
            if steps:
                read = self._converting(name, steps, layer.name)
                for one in (node, self.copied.get(node, node)):
                    one.replace_input_with(self._node(name), read)
        if layer.name in self.flow.ways:
            self._count_rows(layer, node)
            self._slice(layer, node)

    def _count_rows(self, layer: Layer, node: torch.fx.Node) -> None:
        """Lets a cut operation count the rows that it reads: those of its group."""
        first = next(name for name in layer.inputs if self.graph.rows_of(name))
        for name in layer.inputs:
            if self._node(name) in self._sizes:
                steps = self.flow.edges[first, layer.name]
                with self.traced.graph.inserting_before(node):
                    read = self._converting(first, steps, layer.name)
                    rows = self.traced.graph.call_method("size", (read, 0))
                node.replace_input_with(self._node(name), rows)

    def _slice(self, layer: Layer, node: torch.fx.Node) -> None:
        """Lets a cut operation read its own pieces of what all ranks have whole, without rows."""
        way, counts = self.flow.ways[layer.name]
        member = self.rank % len(counts)
        for place, dim in way.sliced:
            name = layer.inputs[place]
            steps = self.flow.edges[name, layer.name]
            each = self.graph.shape_of(name)[dim] // sum(counts)
            whole = self._converting(name, steps, layer.name)
            with self.traced.graph.inserting_before(node):
                own = (whole, dim, each * sum(counts[:member]), each * counts[member])
                read = self.traced.graph.call_method("narrow", own)
            node.replace_input_with(whole, read)

    def _converting(self, name: str, steps: tuple[Conversion, ...], reader: str) -> torch.fx.Node:
        """Returns the node that gives `name` after `steps`; readers with equal steps share it."""
        if not steps:
            return self._node(name)
        known = self.steps.get((name, steps))
        if known is None:
            above = self._converting(name, steps[:-1], reader)
            step = steps[-1]
            path = f"crossings.{step.name}_{_identifier(name)}_{len(self.steps)}"
            group = self.groups["shard", shard_group(self.rank, step.group_size)]
            convert = ConvertLayout(
                step, group, self.context, reader, learns=name in self.graph.learning
            )
            self.traced.add_submodule(path, convert)
            with self.traced.graph.inserting_after(above):
                known = self.traced.graph.call_module(path, (above,))
            self.steps[name, steps] = known
        return known

    def _node(self, name: str) -> torch.fx.Node:
        if name in self.graph.sources:
            return input_node(self.traced.graph, self.graph, name)
        node = self.nodes[self.graph[name].node]
        return self.typed.get(node, node)

    def _return(self) -> None:
        """Has the model return a plain tuple of its outputs, converted as the flow says."""
        output = next(n for n in self.traced.graph.nodes if n.op == "output")
        output.args = (
            tuple(
                self._converting(name, self.flow.returns[name], name) for name in self.graph.outputs
            ),
        )


def _out_of_place(node: torch.fx.Node) -> Any:
    """Returns what computes the same as a node's function or method, into a new tensor."""
    if isinstance(node.target, Changed) or not named_in_place(node.target):
        return node.target
    name = node.target if isinstance(node.target, str) else node.target.__name__
    plain = name.removesuffix("_")
    if node.op == "call_method":
        return plain if hasattr(Tensor, plain) else node.target
    return next((getattr(m, plain) for m in (torch, F) if hasattr(m, plain)), node.target)


def _is_own(module: nn.Module) -> bool:
    """Returns whether a module's forward is the user's own code."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and is_own(code)


def _make_there(module: nn.Module, device: torch.device) -> None:
    """Lets what a module's own code makes lie on a device, unless it says where."""
    forward = module.forward

    def placed(*args: Any, **kwargs: Any) -> Any:
        with device:
            return forward(*args, **kwargs)

    module.forward = placed


def _set_tensor(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts a parameter or buffer in its place, unless no module stands there (any more)."""
    path, _, leaf = name.rpartition(".")
    try:
        owner = root.get_submodule(path)
    except AttributeError:
        return
    if isinstance(tensor, nn.Parameter):
        owner._parameters[leaf] = tensor
    else:
        owner._buffers[leaf] = tensor


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)
