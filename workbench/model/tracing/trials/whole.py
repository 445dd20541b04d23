"""Checks that what was traced computes what the module does, by running both on a few samples.

While a module is traced, its Python code handles stand-ins for tensors, and may take another way
with them than with tensors, unseen: a test of a type or of `requires_grad`, an attribute or a mode
that is set in forward, a hook, an assignment to `.data`. So the module itself and its graph run on
the same samples and the same values, in fp64, and must return the same and have the same gradients.

In a mode in which numbers are drawn at random they are not compared, since a graph may draw them in
another order; nor if the module fails on made-up samples, or gives NaN.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.model.build import with_tensors
from workbench.model.errors import TraceError
from workbench.model.tracing.inputs import called_whole
from workbench.plan.graph import Graph
from workbench.plan.inputs import Input

SAMPLES = 3
MOST_ELEMENTS, MOST_FLOPS = 2**24, 2 * 10**8
"""Of a model's tensors, and of one sample: larger ones would take seconds to compare."""

SAME = 1e-6  # of the largest element; rewritten operations round differently
_CAUSES = (
    "Python code in forward took another way while it was traced: a test of a type, of "
    "requires_grad or of a precision, an attribute or a mode that forward sets, an assignment to "
    ".data, a hook. Decide by what __init__ was given, use torch.where for a choice per element, "
    "or put the lines into a function marked by torch.fx.wrap"
)

Select = Callable[[Any, bool], Sequence[Tensor]]
"""The tensors with a role of what a module returns, and whether it was in training mode."""


def is_small(graph: Graph) -> bool:
    """Whether a model is small enough to be compared whenever it is traced."""
    held = sum(weight.numel for layer in graph.layers for weight in layer.weights)
    return held <= MOST_ELEMENTS and graph.flops <= MOST_FLOPS


def show_same(
    graph: Graph, module: nn.Module, traced: nn.Module, apart: nn.Module, select: Select
) -> None:
    """Checks that a graph computes what the module does.

    Args:
        graph: the graph of the module.
        module: the module, with its values; it is left as it is.
        traced: the module that was traced in training mode.
        apart: the one that was traced in evaluation mode; `traced` where both have the same layers.
        select: a function that takes the tensors that a graph returns from what its module does.

    Raises:
        TraceError: they differ; the text says in what, and what the usual causes are.
    """
    if any(tensor.is_meta or tensor.layout != torch.strided for _, tensor in _named(module)):
        return
    values = {name: _wide(tensor.detach()) for name, tensor in _named(module)}
    if any(name not in values for name, _ in [*_named(traced), *_named(apart)]):
        return
    with torch.random.fork_rng(devices=[]):
        batch = _batch(graph.inputs)
        for training, graphs in ((True, traced), (False, apart)):
            mode = "training" if training else "evaluation"
            whole, played = _filled(module, values), _filled(graphs, values)
            _set_mode(whole, module, training=training)
            if not training:
                played.eval()
            try:
                own = _run(whole, partial(_of_module, whole, graph.inputs, select), batch)
            except Exception:  # whatever it is that these samples were wrong for
                continue
            if own is None:
                continue
            try:
                found = _run(played, partial(_of_graph, played), batch)
            except Exception as error:
                raise TraceError(
                    f"{graph.source.name} runs in {mode}, and what was traced of it fails "
                    f"({type(error).__name__}: {error}). {_CAUSES}"
                ) from None
            if found is not None and (said := _difference(own, _under_all_names(found, module))):
                raise TraceError(
                    f"{graph.source.name} computes in {mode} something else than was traced of it: "
                    f"{said}. {_CAUSES}"
                )


@dataclass(frozen=True)
class _Found:
    """What a module gave: its outputs, and the gradients of its parameters by their names."""

    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor]


def _of_module(
    whole: nn.Module, inputs: Sequence[Input], select: Select, batch: Sequence[Tensor]
) -> Sequence[Tensor]:
    return select(called_whole(whole, inputs, batch), whole.training)


def _of_graph(played: nn.Module, batch: Sequence[Tensor]) -> Sequence[Tensor]:
    returned = played(*batch)
    return returned if isinstance(returned, tuple | list) else (returned,)


def _run(
    model: nn.Module,
    call: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    batch: Sequence[Tensor],
) -> _Found | None:
    """Runs a module, in training also backward; None: it draws, or gives what is no number."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with torch.set_grad_enabled(model.training):
        outputs = call([one.clone() for one in batch])
    if not torch.equal(before, torch.get_rng_state()):
        return None
    if not all(bool(output.isfinite().all()) for output in outputs):
        return None
    gradients: dict[str, Tensor] = {}
    back = [output for output in outputs if output.requires_grad]
    if back:
        noise = [torch.randn(output.shape, dtype=output.dtype) for output in back]
        torch.autograd.backward(back, noise)
        parameters = model.named_parameters(remove_duplicate=False)
        gradients = {name: p.grad for name, p in parameters if p.grad is not None}
    return _Found(tuple(output.detach() for output in outputs), gradients)


def _under_all_names(found: _Found, module: nn.Module) -> _Found:
    """The same with each gradient under every name that its parameter has in a module."""
    names: dict[int, list[str]] = {}
    for name, tensor in _named(module):
        names.setdefault(id(tensor), []).append(name)
    gradients = dict(found.gradients)
    for alike in names.values():
        known = next((gradients[name] for name in alike if name in gradients), None)
        gradients |= {} if known is None else dict.fromkeys(alike, known)
    return replace(found, gradients=gradients)


def _difference(own: _Found, found: _Found) -> str:
    """What differs, in words; "" where nothing does."""
    for first, second in zip(own.outputs, found.outputs, strict=True):
        if first.shape != second.shape:
            return f"an output of shape {tuple(first.shape)}, not {tuple(second.shape)}"
        if (off := _most(first - second)) > SAME * _most(first):
            return f"an output is off by {off:.2g} of {_most(first):.2g}"
    largest = max(map(_most, own.gradients.values()), default=0.0)
    for name in dict.fromkeys([*own.gradients, *found.gradients]):
        pair = [one.gradients.get(name) for one in (own, found)]
        there = [one for one in pair if one is not None]
        off = _most(there[0] - there[1]) if len(there) == 2 else _most(there[0])
        # A gradient that is zero but for rounding is no measure of itself.
        if off > SAME * _most(there[0]) + SAME**2 * largest:
            return f"the gradient of {name!r} is off by {off:.2g} of {_most(there[0]):.2g}"
    return ""


def _most(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module, by all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.float64 if tensor.is_floating_point() else tensor.dtype)


def _filled(module: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a module with these values, by their names."""
    known = {id(tensor): values[name] for name, tensor in _named(module)}

    def made(tensor: Tensor) -> Tensor:
        return known.get(id(tensor), tensor).detach().clone()

    return with_tensors(module, made)


def _set_mode(whole: nn.Module, module: nn.Module, *, training: bool) -> None:
    """Puts a copy into a mode, but for parts that stay in eval mode while the module trains."""
    whole.train(training)
    for path, part in module.named_modules() if training and module.training else ():
        if not part.training:
            whole.get_submodule(path).training = False


def _batch(inputs: Sequence[Input]) -> list[Tensor]:
    """Samples of each input; a mask leaves out something, but never all."""
    found = []
    for one in inputs:
        shape = (SAMPLES, *one.shape)
        if one.dtype == "bool":
            mask = torch.rand(shape) < 0.7
            if one.shape:
                mask[..., 0] = True
            found.append(mask)
        elif one.vocabulary is not None:
            numbers = torch.randint(one.vocabulary, shape)
            if one.vocabulary == 2 and one.shape:  # most likely a mask
                numbers[..., 0] = 1
            found.append(numbers)
        else:
            found.append(torch.randn(shape, dtype=torch.float64))
    return found
