"""A counter of floating-point operations."""

import math
import re
from functools import lru_cache
from typing import Any

import torch
from torch import Tag, Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop

from workbench.model.tracing.draws import can_draw


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
