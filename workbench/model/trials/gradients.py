"""Finds what a gradient reaches, by a backward pass, and what autograd saves for it.

The recorded graph runs once more on fake tensors, with gradients, and backward from the sum of all
that the model returns. A parameter without a gradient then has none in training either: its
`requires_grad` is off, nothing uses it, or its user is detached. Optimizers skip such parameters,
and all ranks must do the same.

Ranks add up the gradients that their rows give to a weight. That is the gradient of the whole batch
where an operation's backward pass is the derivative of its forward pass. It may be another one: an
`nn.Embedding(scale_grad_by_freq=True)` divides by how often a token is in the batch, and hooks,
`torch.autograd.Function` and functions marked by `torch.fx.wrap` may do anything. So such an
operation runs backward on samples (0, 1, 0, 1), which hold everything twice, and on each half:

    gradient of a weight     the sum of the gradients of the halves
    gradient of a sample     the same as in its half
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from workbench.model.errors import OperationError, TraceError
from workbench.model.record.batch import BATCHES, is_users_function, tensors
from workbench.model.record.patches import by_kernels, quiet
from workbench.model.record.runs import key_of, memory_of, peaks, watched
from workbench.model.record.tracer import ValueTracer
from workbench.model.trials.probe import Probe, Samples, alike, has_rows

Call = Callable[[str, Any, Any, Any], Any]


def find_trained(graph: torch.fx.Graph, structure: nn.Module, tracer: ValueTracer) -> None:
    """Finds what a gradient reaches, and has parameters that it does not reach require none.

    It sets `learns` in each node's `meta`: whether a gradient reaches the node's value; and
    `saved`: what autograd saves of the node's operation.

    Raises:
        TraceError: the backward pass fails, as it would in training.
    """
    root, reached = tracer.root, set[Node]()
    with tracer.mode, by_kernels(), quiet(), torch.enable_grad():
        batch = {name: torch.empty_like(few) for name, (few, _) in tracer.inputs.items()}
        held = memory_of([*root.parameters(), *root.buffers()])
        returned = _run(graph, root, batch, tracer.call, reached, held)
        returned = [y for y in returned if y.requires_grad]
        if returned:
            _back(returned)
    for node in graph.nodes:
        node.meta["learns"] = node in reached
    named = root.named_parameters(remove_duplicate=False)
    trained = {name for name, parameter in named if parameter.grad is not None}
    for name, parameter in structure.named_parameters():
        if name not in trained:
            parameter.requires_grad_(False)


def _run(
    graph: torch.fx.Graph,
    root: nn.Module,
    batch: Mapping[str, Tensor],
    call: Call,
    reached: set[Node],
    held: frozenset[int],
) -> list[Tensor]:
    """The model's outputs; a backward pass from them records the nodes that it reaches."""
    values: dict[Node, Any] = {}
    known: dict[Hashable, tuple[float, float]] = {}
    for node in graph.nodes:
        if node.op == "output":
            return tensors(map_arg(node.args, values.__getitem__))
        if node.op == "placeholder":
            values[node] = batch[str(node.target)]
            continue
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        sources: list[Node] = []
        map_arg((node.args, node.kwargs), sources.append)
        given = [values[source] for source in sources]
        result, node.meta["saved"] = watched(
            partial(call, node.op, node.target, args, kwargs), given, held
        )
        if _is_foreign(node, root) or _meets_parameter(given):
            module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
            learning = [*tensors(given), *(module.parameters() if module is not None else ())]
            shapes = key_of(node.target, module, [(args, kwargs)])
            key = shapes and (shapes, *(one.requires_grad for one in learning))
            copies = {source: _copied(values[source]) for source in sources}  # it may write there
            args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
            again = partial(call, node.op, node.target, args, kwargs)
            with suppress(Exception):  # which `_back` explains
                most = known.get(key) or peaks(again, list(copies.values()))
                known |= {key: most} if key else {}
                node.meta["saved"] = replace(node.meta["saved"], forward=most[0], backward=most[1])
        values[node] = pytree.tree_map(_apart, result)
        for tensor in tensors(values[node]):
            if tensor.requires_grad:
                tensor.register_hook(partial(_note, reached, node))
    raise AssertionError("a graph ends with its output")


def _is_foreign(node: Node, root: nn.Module) -> bool:
    """Whether it is one operation whose code is not torch's: it may make what nobody sees."""
    if node.op == "call_module":
        return not type(root.get_submodule(str(node.target))).__module__.startswith("torch.")
    return node.op == "call_function" and is_users_function(node.target)


def _meets_parameter(given: Sequence[Any]) -> bool:
    """Whether a parameter is broadcast: its gradient is first made as large as the activation's."""
    read = [tensor for value in given for tensor in tensors(value) if tensor.requires_grad]
    sizes = {tensor.numel() for tensor in read}
    return len(sizes) > 1 and any(isinstance(tensor, nn.Parameter) for tensor in read)


def _apart(value: Any) -> Any:
    """A tensor that is no view: one that is changed in place would lose its hook."""
    return value.clone() if isinstance(value, Tensor) and value._is_view() else value


def _copied(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, value)


def _note(reached: set[Node], node: Node, gradient: Tensor | None) -> None:
    if gradient is not None:
        reached.add(node)


def _back(returned: list[Tensor]) -> None:
    try:
        torch.autograd.backward([y.sum() for y in returned])
    except Exception as error:
        raise TraceError(
            f"the backward pass cannot be followed: {type(error).__name__}: {error}. What is not "
            "to be trained is detached, x.detach(); a backward pass of one's own may not depend "
            "on values, as through .item()"
        ) from error


_HALF: Samples = (0, 1)
_WHOLE: Samples = _HALF + _HALF


def needs_trial(probe: Probe) -> bool:
    """Whether an operation has weights, or a backward pass that anybody may have written."""
    module = probe.module()
    if module is not None:
        hooked = any(part._backward_hooks or part._backward_pre_hooks for part in module.modules())
        return hooked or any(True for _ in module.parameters())
    read = probe.node.all_input_nodes
    return is_users_function(probe.node.target) or any(_is_weight(probe, n) for n in read)


def _is_weight(probe: Probe, source: Node) -> bool:
    """Whether a value is a parameter, or computed from parameters alone."""
    return not source.meta["depends"] and not probe.traced.varies[source]


def show_backward(probe: Probe, name: str) -> None:
    """Tries the backward pass of a probe's operation.

    Raises:
        OperationError: a sample's gradient depends on the other samples, or one is sparse.
    """
    towards = [
        probe.traced.noise.values((len(_WHOLE), *_of_one(small)), small.dtype, "normal")
        for small, _ in _differentiable(probe)
    ]
    if not towards:  # truths or whole numbers, such as a comparison with a constant
        return
    whole = _gradients(probe, _WHOLE, towards)
    if any(gradient.layout != torch.strided for gradient in whole.values()):
        raise OperationError(
            probe.node,
            f"{name} has sparse gradients, which are not summed over ranks: build it with "
            "sparse=False",
        )
    first, second = (
        _gradients(probe, _HALF, part)
        for part in zip(*(toward.split(len(_HALF)) for toward in towards), strict=True)
    )
    for key, gradient in whole.items():
        of_samples = isinstance(key, Node)
        parts = first[key], second[key]
        if not alike(gradient, torch.cat(parts) if of_samples else sum(parts), rounded=True):
            which = "a sample" if of_samples else "its weights"
            raise OperationError(
                probe.node,
                f"the backward pass of {name} mixes samples: the gradient of {which} for two "
                "samples is another where the batch has more. Ranks have rows of the batch, and "
                "sum what these give: use a backward pass that treats each sample by itself, as "
                "scale_grad_by_freq=True does not",
            )


def _differentiable(probe: Probe) -> list[tuple[Tensor, Tensor]]:
    """The results that may have a gradient, at both batch sizes."""
    return [pair for pair in probe.leaves() if has_rows(*pair) and _is_real(pair[0])]


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _of_one(small: Tensor) -> tuple[int, ...]:
    """The shape of one sample's rows."""
    return small.shape[0] // BATCHES[0], *small.shape[1:]


def _gradients(
    probe: Probe, samples: Samples, towards: Sequence[Tensor]
) -> dict[Node | str, Tensor]:
    """The gradients of each activation read, by its node, and of each weight, by its name."""
    module = probe.module()
    leaves: dict[Node | str, Tensor] = {
        name: weight
        for name, weight in ([] if module is None else module.named_parameters())
        if weight.requires_grad
    }
    given: dict[Node, Tensor] = {}
    for source in probe.node.all_input_nodes:
        value = probe.value(source, samples, 1)
        learns = source.meta["depends"] or _is_weight(probe, source)
        if learns and isinstance(value, Tensor) and _is_real(value):
            leaf = value.detach().clone().requires_grad_()
            leaves[source if source.meta["depends"] else source.name] = leaf
            given[source] = leaf
    with torch.enable_grad():
        # A copy: the operation may change what it reads in place.
        copies = {source: leaf.clone() for source, leaf in given.items()}
        results = tensors(probe.run(probe.node, samples, copies))
        pairs = zip(results, probe.leaves(), strict=True)
        found = [r for r, pair in pairs if has_rows(*pair) and _is_real(pair[0])]
        back = [
            (result, toward.flatten(0, 1))
            for result, toward in zip(found, towards, strict=True)
            if result.requires_grad
        ]
        if not back:
            return {}
        made = torch.autograd.grad(
            [result for result, _ in back],
            list(leaves.values()),
            [toward for _, toward in back],
            allow_unused=True,
        )
    return {key: g for key, g in zip(leaves, made, strict=True) if g is not None}
