"""Runs an operation at both batch sizes; what is like one before is not run again.

Most operations of a model of many equal blocks are: a library's operation on tensors of the same
shapes gives tensors of the same shapes, which are made without it in a fifth of the time. That is
so where its result is memory of its own; a view shares that of its source, and is run each time.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from workbench.model.tracing.batch import BATCHES, tensors, versions, written_since
from workbench.model.tracing.draws import RecordedDraws, Shapes, drawing
from workbench.model.tracing.inputs import KNOWN
from workbench.model.tracing.trials.flops import FlopCounter
from workbench.model.tracing.trials.saved import memory_of

Arguments = tuple[Any, dict[str, Any]]
"""The positional arguments, and those by keyword."""
_PLAIN = {*KNOWN, torch.dtype, torch.device, torch.layout, torch.memory_format}
_LIBRARIES = ("torch", "_operator", "None")  # what is made in C has no module


@dataclass(frozen=True)
class Ran:
    """The results of an operation.

    Attributes:
        values: the operation's values at both batch sizes.
        flops: the FLOPs of one sample.
        uncounted: whether it does more FLOPs than these.
        drawn: the shapes of the random tensors that it drew, at both batch sizes.
        written: the tensors into which it wrote, of those that it read.
    """

    values: tuple[Any, ...]
    flops: int = 0
    uncounted: bool = False
    drawn: tuple[Shapes, Shapes] = ([], [])
    written: tuple[Tensor, ...] = ()


class Runs:
    """Runs operations on fake tensors.

    Args:
        mode: the mode that their tensors are made under.
        known: the results of operations so far, by what is called and read; more are added.
    """

    def __init__(self, mode: FakeTensorMode, known: dict[Hashable, Ran]) -> None:
        self._mode, self._known = mode, known

    def run(
        self,
        call: Callable[[Any, Any], Any],
        target: Any,
        module: nn.Module | None,
        arguments: Sequence[Arguments],
    ) -> Ran:
        """What an operation gives.

        Args:
            call: a function that runs it: (positional arguments, keyword arguments) -> value.
            target: the function, or the name of the method, that is called.
            module: the module that is called; None: it is a function or method.
            arguments: the arguments at both batch sizes.
        """
        held = [] if module is None else [*module.parameters(), *module.buffers()]
        try:
            key = (_called(target, module, arguments[0]), *map(_part, arguments))
        except _Unlike:
            return self._ran(call, held, arguments)
        if key in self._known:
            known = self._known[key]
            with torch.no_grad(), self._mode:
                return replace(known, values=tuple(map(_made, known.values)))
        ran = self._ran(call, held, arguments)
        if not ran.written and _is_new(ran.values, [*held, *tensors(arguments)]):
            self._known[key] = replace(ran, values=tuple(map(_part, ran.values)))
        return ran

    def _ran(
        self,
        call: Callable[[Any, Any], Any],
        held: Sequence[Tensor],
        arguments: Sequence[Arguments],
    ) -> Ran:
        values, counters, drawn, written = [], [], [], list[Tensor]()
        for given in arguments:
            counter, draws = FlopCounter(), RecordedDraws()
            before = versions(given)
            with torch.no_grad(), self._mode, counter:
                values.append(call(*given))
            written += written_since(before, given)
            if counter.random:
                with torch.no_grad(), self._mode, drawing(draws):
                    call(*given)
            counters.append(counter)
            drawn.append(draws.shapes)
        few, many = BATCHES
        flops = (counters[1].flops - counters[0].flops) // (many - few)
        uncounted = counters[0].foreign or (
            flops == 0
            and not counters[0].looked_up
            and any(_is_matrix(tensor, values[0]) for tensor in held)
        )
        return Ran((values[0], values[1]), flops, uncounted, (drawn[0], drawn[1]), tuple(written))


class _Unlike(Exception):
    """It depends on more than shapes, types and plain values."""


@dataclass(frozen=True)
class _Described:
    """A tensor without its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _called(target: Any, module: nn.Module | None, first: Arguments) -> Hashable:
    """What is called, as far as its results depend on it."""
    if module is not None:
        return _of_module(module)
    args, _ = first
    if isinstance(target, str) and args and isinstance(args[0], Tensor):
        return target
    library = str(getattr(target, "__module__", None)).partition(".")[0]
    if isinstance(target, BuiltinFunctionType | FunctionType) and library in _LIBRARIES:
        return target
    raise _Unlike


def _of_module(module: nn.Module) -> Hashable:
    if not type(module).__module__.startswith("torch.nn.modules."):
        raise _Unlike
    parts = []
    for name, value in vars(module).items():
        if isinstance(value, set):  # names of buffers
            continue
        if isinstance(value, dict) and value and name not in ("_parameters", "_buffers"):
            raise _Unlike  # hooks, or modules
        parts.append((name, _part(value)))
    return type(module), tuple(parts)


def _part(value: Any) -> Hashable:
    """A value, or that of which it is made, as far as shapes depend on it.

    Raises:
        _Unlike: that cannot be said of it.
    """
    if isinstance(value, Tensor):
        if not isinstance(value, FakeTensor) or value.constant is not None:
            raise _Unlike
        if value.layout != torch.strided or value.is_conj() or value.is_neg():
            raise _Unlike
        return _Described(tuple(value.shape), value.stride(), value.dtype, value.device)
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind in (tuple, list, torch.Size):
        return kind, tuple(map(_part, value))
    if isinstance(value, dict):
        return dict, tuple((name, _part(each)) for name, each in value.items())
    if kind is slice:
        return kind, _part(value.start), _part(value.stop), _part(value.step)
    raise _Unlike


def _is_new(values: Sequence[Any], read: Sequence[Tensor]) -> bool:
    """Whether each value is a tensor, or some of them, each of memory of its own."""
    found = tensors(values)
    try:
        described = [_part(value) for value in values]
    except _Unlike:
        return False
    whole = all(
        tensor.storage_offset() == 0
        and not tensor._is_view()
        and tensor.untyped_storage().nbytes() == _nbytes(tensor)
        for tensor in found
    )
    alone = len(memory_of(found)) == len(found) and not memory_of(found) & memory_of(read)
    return bool(found) and whole and alone and all(map(_is_of_tensors, described))


def _is_of_tensors(described: Any) -> bool:
    if isinstance(described, _Described):
        return True
    kind, parts = described if len(described) == 2 else (None, ())
    return kind in (tuple, list) and all(map(_is_of_tensors, parts))


def _nbytes(tensor: Tensor) -> int:
    """The bytes that its shape and strides reach."""
    if tensor.numel() == 0:
        return 0
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def _made(described: Any) -> Any:
    if isinstance(described, _Described):
        return torch.empty_strided(
            described.shape, described.stride, dtype=described.dtype, device=described.device
        )
    kind, parts = described
    return kind(map(_made, parts))


def _is_matrix(weight: Tensor, value: Any) -> bool:
    """Whether a weight is multiplied as a matrix, not element by element."""
    shapes = [tuple(tensor.shape) for tensor in tensors(value)]
    along = any(shape[len(shape) - weight.ndim :] == tuple(weight.shape) for shape in shapes)
    return weight.ndim > 1 and not along
