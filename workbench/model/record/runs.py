"""One run of an operation at both batch sizes: its values, FLOPs, and what autograd saves.

Most operations of a model of many equal blocks are like one before, and are not counted again: a
library's operation on tensors of the same shapes gives tensors of the same shapes. Where its result
is memory of its own it is not even run, since making the tensors takes a fifth of the time.

A saved tensor is told by its memory: that of an input or of the output is there anyway, that of
the model's own parameters and buffers always is, and all other is new.
"""

import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tag, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop

from workbench.model.record.batch import BATCHES, tensors, versions, written_since
from workbench.model.record.draws import RecordedDraws, Shapes, can_draw, drawing
from workbench.model.record.inputs import KNOWN
from workbench.plan.graph.saved import Saved

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
    """Runs operations on fake tensors."""

    def __init__(self, mode: FakeTensorMode, known: dict[Hashable, Ran]) -> None:
        self._mode, self._known = mode, known

    def run(
        self,
        call: Callable[[Any, Any], Any],
        target: Any,
        module: nn.Module | None,
        arguments: Sequence[Arguments],
    ) -> Ran:
        """What an operation gives."""
        held = [] if module is None else [*module.parameters(), *module.buffers()]
        key = key_of(target, module, arguments)
        if key is None:
            return self._ran(call, held, arguments)
        if key in self._known:
            known = self._known[key]
            with torch.no_grad(), self._mode:
                made = map(_remade, known.values) if known.values else (call(*a) for a in arguments)
                return replace(known, values=tuple(made))
        ran = self._ran(call, held, arguments)
        if not ran.written:
            new = _is_new(ran.values, [*held, *tensors(arguments)])
            self._known[key] = replace(ran, values=tuple(map(_part, ran.values)) if new else ())
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


def key_of(
    target: Any, module: nn.Module | None, arguments: Sequence[Arguments]
) -> Hashable | None:
    """What the results depend on, but for memory; None: that cannot be said."""
    try:
        return (_called(target, module, arguments[0]), *map(_part, arguments))
    except _Unlike:
        return None


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
    if not type(module).__module__.startswith(("torch.nn.modules.", "torchvision.")):
        raise _Unlike
    parts = []
    for name, value in vars(module).items():
        if isinstance(value, set):  # names of buffers
            continue
        if name == "_modules":
            parts += [(inner, _of_module(part)) for inner, part in value.items()]
            continue
        if isinstance(value, dict) and value and name not in ("_parameters", "_buffers"):
            raise _Unlike  # hooks
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
        tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == _nbytes(tensor)
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


def _remade(described: Any) -> Any:
    if isinstance(described, _Described):
        return torch.empty_strided(
            described.shape, described.stride, dtype=described.dtype, device=described.device
        )
    kind, parts = described
    return kind(map(_remade, parts))


def _is_matrix(weight: Tensor, value: Any) -> bool:
    """Whether a weight is multiplied as a matrix, not element by element."""
    shapes = [tuple(tensor.shape) for tensor in tensors(value)]
    along = any(shape[len(shape) - weight.ndim :] == tuple(weight.shape) for shape in shapes)
    return weight.ndim > 1 and not along


def _recurrent(
    x: Tensor, weight: Tensor, hidden: Tensor, *args: Any, out_val: Any = None, **kwargs: Any
) -> int:
    """FLOPs of one layer and direction of an LSTM: each step multiplies by both weights."""
    steps_and_rows: int = x.shape[0] * x.shape[1]
    return 2 * steps_and_rows * (weight.numel() + hidden.numel())


def _with_vector(first: Tensor, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """FLOPs of a matrix times a vector, or of two vectors: each element is multiplied once."""
    return 2 * first.numel()


def _added_with_vector(
    bias: Tensor, matrix: Tensor, *args: Any, out_val: Any = None, **kwargs: Any
) -> int:
    return 2 * matrix.numel()


def _grouped(first: Tensor, second: Tensor, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """FLOPs of products by groups, as those of experts: each row is multiplied by one matrix."""
    groups = first.shape[0] if first.ndim == second.ndim == 3 else 1
    return 2 * groups * math.prod(first.shape[-2:]) * second.shape[-1]


_aten = torch.ops.aten
_FORMULAS: dict[Any, Any] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten.mv: _with_vector,
    _aten.dot: _with_vector,
    _aten.vdot: _with_vector,
    _aten.addmv: _added_with_vector,
    _aten._grouped_mm: _grouped,
}
# Operations that read rows of a matrix, and compute nothing.
_LOOKUPS = (_aten.embedding, _aten._embedding_bag)

# What torch's tags do not tell of its operations: those that move values, compare them, or do a few
# operations with each, as norms, pooling and softmax do.
_COUNT_NOTHING = re.compile(
    r"""
      cat|stack|chunk_cat|copy|to_copy|\w*_copy|local_scalar_dense|lift|pin_memory|resize\w*|set
    | unsafe_\w+|\w*_like|new_\w*|fill|zero|complex|polar
    | (constant|reflection|replication)_pad\w*|flip|roll|rot90|repeat|repeat_interleave
    | index\w*|gather|scatter\w*|\w+_scatter|take|put|masked_\w+|nonzero\w*
    | embedding\w*|tril|triu|diag_embed|block_diag|trace|pixel_\w+|channel_shuffle|im2col|col2im
    | upsample_nearest\w*|max_unpool\w*|pack_padded_sequence
    | sort|topk|kthvalue|(nan)?median|mode|cum(max|min)\w*|searchsorted|bucketize|hist\w+|bincount
    | unique\w*|isin|allclose|is_\w+|(functional_)?(assert|sym_constrain)\w+
    | all|any|a?(max|min)|aminmax|arg(max|min)|count_nonzero|sum|nansum|prod|mean|norm|(std|var)\w*
    | logsumexp|linalg_vector_norm|linalg__powsum|dist
    | (log_|safe_)?softmax|cumsum|cumprod|logcumsumexp|addr|linalg_cross
    | native_\w*norm\w*|(cudnn_|miopen_)?batch_norm\w*|fused_rms_norm|renorm|weight_norm_interface
    | (adaptive_|fractional_)?(avg|max)_pool\w*
    | hardswish|glu|log_sigmoid_forward|prelu_kernel|floor_divide|thnn_fused_\w+_cell
    | (mse|nll|smooth_l1|huber|soft_margin|multi_margin|multilabel_margin)_loss\w*
    | binary_cross_entropy\w*
    """,
    re.VERBOSE,
)
_VIEWS = {Tag.view_copy, Tag.inplace_view}
# Series, which take some ten to a hundred operations for each element, though they are pointwise.
_SERIES = re.compile(r"special_(?!entr|xlog1py)\w+|i0|igammac?|(di|poly|l|mvl)gamma")


class FlopCounter(TorchDispatchMode):
    """Adds up the FLOPs of matrix products, convolutions and attention (a multiply-add is 2).

    It is `torch.utils.flop_counter` without its bookkeeping for each module, and with the kernels
    of CPUs for attention and recurrent layers. What moves values, or does a few operations with
    each, counts as nothing.

    Attributes:
        flops: the FLOPs counted so far.
        random: whether an operation that can draw random numbers was run.
        looked_up: whether rows of a matrix were read, which is no FLOP.
        foreign: whether an operation was run that may do any number of FLOPs: of another library
            than torch, or without a formula, as a Fourier transform.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.random = False
        self.looked_up = False
        self.foreign = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        value = func(*args, **kwargs)
        self.random = self.random or can_draw(func, args, kwargs)
        formula = _formula(func)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=value)
        self.looked_up |= func._overloadpacket in _LOOKUPS
        if formula is None and not _counts_nothing(func):
            # What reads no tensor makes one.
            self.foreign |= any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))
        return value


@lru_cache(maxsize=4096)
def _formula(func: Any) -> Any:
    """What counts an operation's FLOPs: in place, as that of the one that is not; None: nothing."""
    packet = func._overloadpacket
    return _FORMULAS.get(packet) or _FORMULAS.get(_twin(packet))


@lru_cache(maxsize=4096)
def _counts_nothing(func: Any) -> bool:
    """Whether an operation of torch moves values, or does a few operations with each."""
    if func.namespace in ("prim", "prims"):
        return True
    if func.namespace != "aten":
        return False
    packet = func._overloadpacket
    name = packet.__name__.strip("_")
    if _SERIES.fullmatch(name):
        return False
    both = [one for one in (packet, _twin(packet)) if one is not None]
    every = [getattr(one, overload) for one in both for overload in one.overloads()]
    tags = {tag for one in every for tag in one.tags}
    draws = Tag.nondeterministic_seeded in tags and "attention" not in name
    views = any(one.is_view for one in every) or not tags.isdisjoint(_VIEWS)
    return draws or views or Tag.pointwise in tags or _COUNT_NOTHING.fullmatch(name) is not None


def _twin(packet: Any) -> Any:
    """Of an operation in place, the one that is not; None: there is none."""
    name = packet.__name__
    in_place = name.endswith("_") and not name.endswith("__")
    return getattr(_aten, name[:-1], None) if in_place else None


def watched(
    call: Callable[[], Any], given: Sequence[Any], held: frozenset[int]
) -> tuple[Any, Saved]:
    """Runs an operation; returns its result and what autograd has saved of it."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    # Before it runs: an operation may change what it reads in place.
    read = [memory_of(tensors(value)) for value in given]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = call()
    made = tensors(result)
    of_result, saved = memory_of(made), memory_of(kept)
    first = next((memory for memory in read if memory), frozenset[int]())
    view = bool(of_result) and of_result <= first
    there = frozenset().union(*read, of_result, held)
    new = {_memory(tensor): tensor for tensor in kept if _memory(tensor) not in there}
    elements = sum(tensor.numel() for tensor in made)
    types = {tensor.dtype for tensor in made}
    # Smaller ones are statistics, which stay in full precision where autocast is on.
    alike = [t for t in new.values() if t.dtype in types and t.numel() >= elements]
    words = sum(tensor.numel() for tensor in alike)
    others = sum(tensor.nbytes for tensor in new.values()) - sum(t.nbytes for t in alike)
    return result, Saved(
        inputs=tuple(place for place, memory in enumerate(read) if memory & (saved - held)),
        output=not view and bool(saved & of_result),
        view=view,
        words=words / max(elements, 1),
        bytes=others / max(elements, 1),
    )


def peaks(call: Callable[[], Any], given: Sequence[Any]) -> tuple[float, float]:
    """The most that an operation takes beside what stays, forward and backward.

    Elements for each element of its output. Its output and what is saved stay, and the gradients
    that it gives.
    """
    with _NewMemory() as forward:
        result = call()
        taken = forward.most - forward.alive
    made = [tensor for tensor in tensors(result) if tensor.requires_grad]
    wanted = [tensor for value in given for tensor in tensors(value) if tensor.requires_grad]
    given_bytes = max(sum(tensor.nbytes for tensor in tensors(result)), 1)
    if not made or not wanted:
        return taken / given_bytes, 0.0
    starts = [torch.ones_like(tensor) for tensor in made]
    with _NewMemory() as backward:
        gradients = torch.autograd.grad(made, wanted, starts, allow_unused=True)
        back = backward.most - backward.alive
    del gradients
    return taken / given_bytes, back / given_bytes


class _NewMemory(TorchDispatchMode):
    """Looks on which memory is made."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def alive(self) -> int:
        return sum(size for made, size in self._made.values() if not made.expired())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        read = memory_of(tensors((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        for tensor in tensors(result):
            if _memory(tensor) not in read:
                storage = tensor.untyped_storage()
                self._made[_memory(tensor)] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.alive)
        return result


def memory_of(these: Iterable[Tensor]) -> frozenset[int]:
    """The memory of tensors, a number for each that is shared with no other."""
    return frozenset(map(_memory, these))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
