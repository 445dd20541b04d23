"""Segments of a cut model that keep only their inputs, and are computed again in backward.

    forward     inputs -> outputs         under torch's checkpoint: what is saved is dropped
    backward    gradients of all outputs  the gate is reached, which saves one (empty) tensor:
                                          the segment runs again, to its end
                then layer by layer       each frees what it has used

Without the gate a rank would run its segment again when its first layer asks for what it saved,
and stop after the last one that saved anything: ranks that own nothing of a layer save nothing,
and would come to the segment's collectives in another order than the others, or not at all.
"""

import copy
import operator
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from workbench.layers.local.norms import LocalBatchNorm
from workbench.plan.plans.plan import Plan


def with_segments(part: torch.fx.GraphModule, plan: Plan) -> torch.fx.GraphModule:
    """Returns the same computation on the same layers, with the plan's segments recomputed.

    Args:
        part: a cut model or a part of it; it is left as it is.
        plan: the plan; each of its segments lies wholly inside the part, or outside.
    """
    if not plan.segments:
        return part
    folded = torch.fx.GraphModule(part, copy.deepcopy(part.graph), type(part).__name__)
    nodes = {node.name: node for node in folded.graph.nodes}
    learning = {layer.node: layer.name in plan.graph.learning for layer in plan.graph.layers}
    for index, names in enumerate(plan.segments):
        called = [plan.graph[name].node for name in names]
        held = [nodes[node] for node in called if node in nodes]
        if held:
            _fold(folded, held[0], held[-1], f"recomputed_{index}", learning)
    folded.graph.lint()
    folded.recompile()
    return folded


class Recomputed(nn.Module):
    """One segment that keeps only its inputs (activation checkpointing).

    Args:
        compute: the segment's layers, and the conversions between them.
    """

    def __init__(self, compute: torch.fx.GraphModule, reached: tuple[bool, ...]) -> None:
        super().__init__()
        self.compute, self.reached = compute, reached

    def forward(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.compute(*inputs)
        # What is drawn is no random number of torch's (`model/tracing/draws.py`).
        return checkpoint(
            self._gated,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=self._contexts,
        )

    def _gated(self, *inputs: Any) -> Any:
        outputs = self.compute(*inputs)
        # Behind the gate, conversions would communicate zeros for an output without a gradient.
        learning = [x for x, reached in zip(outputs, self.reached, strict=True) if reached]
        values, structure = tree_flatten(learning)
        at = [i for i, x in enumerate(values) if isinstance(x, Tensor) and x.is_floating_point()]
        if at:
            for i, x in zip(at, _Gate.apply(*(_learning(values[i]) for i in at)), strict=True):
                values[i] = x
        gated = iter(tree_unflatten(values, structure))
        pairs = zip(outputs, self.reached, strict=True)
        return tuple(next(gated) if reached else x for x, reached in pairs)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._again()

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Undoes what the second pass does to running statistics: they have seen this batch."""
        buffers = list(self.compute.buffers())
        seen = [buffer.clone() for buffer in buffers]
        shares = [m.share for m in self.compute.modules() if isinstance(m, LocalBatchNorm)]
        values = [None if share is None else share.value for share in shares]
        try:
            yield
        finally:
            for share, known in zip(shares, values, strict=True):
                if share is not None:
                    share.value = known
            with torch.no_grad():
                for buffer, value in zip(buffers, seen, strict=True):
                    buffer.copy_(value)


def _learning(x: Tensor) -> Tensor:
    """Returns x requiring a gradient: also where nothing of what is trained is at hand.

    Then this rank runs the segment again as the others do, with its collectives.
    """
    return x if x.requires_grad else x.detach().requires_grad_()


class _Gate(torch.autograd.Function):
    """The identity of a segment's outputs, whose backward has the segment computed again."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(outputs[0].new_empty(0))
        return tuple(x.view_as(x) for x in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return grads


def _fold(
    module: torch.fx.GraphModule,
    first: torch.fx.Node,
    last: torch.fx.Node,
    path: str,
    learning: Mapping[str, bool],
) -> None:
    """Puts one call in the place of all that is computed from `first` to `last`."""
    run, node = [first], first
    while node is not last:
        node = node.next
        if node.op != "get_attr":  # parameters come in as inputs
            run.append(node)
    held = set(run)
    inputs = dict.fromkeys(n for node in run for n in node.all_input_nodes if n not in held)
    outputs = [node for node in run if any(user not in held for user in node.users)]
    graph = torch.fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in run:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    reached = tuple(_is_reached(node, learning) for node in outputs)
    segment = torch.fx.GraphModule(module, graph, "Segment")
    module.add_submodule(path, Recomputed(segment, reached))
    with module.graph.inserting_after(last):
        call = module.graph.call_module(path, tuple(inputs))
    for index, node in reversed(list(enumerate(outputs))):
        with module.graph.inserting_after(call):
            output = module.graph.call_function(operator.getitem, (call, index))
        node.replace_all_uses_with(output, delete_user_cb=lambda user: user not in held)
    for node in reversed(run):
        module.graph.erase_node(node)


def _is_reached(node: torch.fx.Node, learning: Mapping[str, bool]) -> bool:
    """Returns whether a gradient comes back to a node; to a conversion, from any reader."""
    if node.op == "output" or node.name in learning:
        return learning.get(node.name, True)
    return any(_is_reached(user, learning) for user in node.users)
