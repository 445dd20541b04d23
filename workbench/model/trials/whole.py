"""Checks that what was traced computes what the module does, by training both on a few samples.

While a module is traced, its Python code handles stand-ins for tensors, and may take another way
with them than with tensors, unseen: a test of a type or of `requires_grad`, an attribute or a mode
that is set in forward, a hook, an assignment to `.data`. So the module itself and its graph run on
the same samples and the same values, in fp64, and must return the same and have the same gradients.
In training they make the same updates, at the module's own values and at others, several times as
large and all unlike each other, and must hold the same tensors after each step: what a clamp or a
teacher's average does to values that they do not suit is seen there.

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
from workbench.model.record.inputs import called_whole
from workbench.plan.graph.graph import Graph, Input

SAMPLES = 3
MOST_ELEMENTS, MOST_FLOPS = 2**24, 2 * 10**8
"""Of a model's tensors, and of one sample: larger ones would take seconds to compare."""
SCALES = (1.0, 3.0)
"""What parameters are multiplied by; at all but the first, noise is added to them."""
_NOISE, _RATE = 0.3, 0.05  # of a tensor's norm: the noise, and an update
_POOL = 65_521  # a prime: numbers of noise, which are repeated

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
    graph: Graph,
    module: nn.Module,
    traced: nn.Module,
    apart: nn.Module,
    select: Select,
    *,
    steps: int = 1,
) -> None:
    """Checks that a graph computes what the module does.

    Raises:
        TraceError: they differ; the text says in what, and what the usual causes are.
    """
    if any(tensor.is_meta or tensor.layout != torch.strided for _, tensor in _named(module)):
        return
    values = {name: _wide(tensor.detach()) for name, tensor in _named(module)}
    if any(name not in values for name, _ in [*_named(traced), *_named(apart)]):
        return
    whole = _filled(module, values)
    played = _filled(traced, {name: value.clone() for name, value in values.items()})
    training = _Pair(graph, module, whole, played, select)
    with torch.random.fork_rng(devices=[]):
        batch = _batch(graph.inputs)
        for scale in SCALES:
            if scale != 1.0:
                training.scale(scale)
            _set_mode(whole, module, training=True)
            for step in range(steps):
                if step:
                    training.update()
                if not training.compare(batch):
                    break
            if scale == 1.0:
                whole.eval()
                evaluated = _filled(apart, dict(_named(whole))).eval()
                _Pair(graph, module, whole, evaluated, select).compare(batch)


@dataclass(frozen=True)
class _Pair:
    """A module and what was traced of it, with the same values."""

    graph: Graph
    module: nn.Module
    whole: nn.Module
    played: nn.Module
    select: Select

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiplies parameters, and adds noise, in both alike."""
        pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        known = dict(_named(self.whole))
        for parameter in self.whole.parameters():
            count = parameter.numel()
            size = _NOISE * float(parameter.norm()) / max(count, 1) ** 0.5
            noise = pool.repeat(count // _POOL + 1)[:count].view(parameter.shape)
            parameter.add_(noise, alpha=size).mul_(factor)
            pool = pool.roll(1)  # equal tensors are unlike each other now
        for name, tensor in _named(self.played):
            tensor.copy_(known[name])

    def compare(self, batch: Sequence[Tensor]) -> bool:
        """Runs both on a batch; returns whether there was something to compare.

        Raises:
            TraceError: they differ.
        """
        name, whole, played = self.graph.source.name, self.whole, self.played
        mode = "training" if whole.training else "evaluation"
        try:
            of_module = partial(_of_module, whole, self.graph.inputs, self.select)
            own = _run(whole, of_module, batch)
        except Exception:  # whatever it is that these samples were wrong for
            return False
        if own is None:
            return False
        try:
            found = _run(played, partial(_of_graph, played), batch)
        except Exception as error:
            raise TraceError(
                f"{name} runs in {mode}, and what was traced of it fails "
                f"({type(error).__name__}: {error}). {_CAUSES}"
            ) from None
        if found is None:
            return False
        said = _difference(own, _under_all_names(found, self.module)) or self._tensors_differ()
        if said:
            raise TraceError(
                f"{name} computes in {mode} something else than was traced of it: {said}. {_CAUSES}"
            )
        return True

    def _tensors_differ(self) -> str:
        """What the module holds otherwise than its graph, in words; "" where nothing is."""
        graph = dict(_named(self.played))
        for name, tensor in _named(self.whole):
            other = graph.get(name, tensor).detach()
            if torch.equal(tensor, other):
                continue
            if _most(tensor.detach().double() - other.double()) > SAME * _most(other.double()):
                return f"forward changes {name!r}"
        return ""

    @torch.no_grad()
    def update(self) -> None:
        """Makes a step of gradient descent in both."""
        for side in (self.whole, self.played):
            for parameter in side.parameters():
                if parameter.grad is not None and (size := parameter.grad.norm()) > 0:
                    parameter.sub_(parameter.grad, alpha=float(_RATE * parameter.norm() / size))
                parameter.grad = None


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
    largest = None
    for name in dict.fromkeys([*own.gradients, *found.gradients]):
        pair = [one.gradients.get(name) for one in (own, found)]
        there = [one for one in pair if one is not None]
        if len(there) == 2 and torch.equal(*there):
            continue
        off = _most(there[0] - there[1]) if len(there) == 2 else _most(there[0])
        if largest is None:
            largest = max(map(_most, own.gradients.values()), default=0.0)
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
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    return tensor.to("cpu", dtype, copy=True)


def _filled(module: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a module that holds these values, by their names."""
    known = {id(tensor): values[name] for name, tensor in _named(module)}

    def made(tensor: Tensor) -> Tensor:
        return known.get(id(tensor), tensor).detach()

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
