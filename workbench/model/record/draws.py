"""Random tensors that depend on the position of their elements, not on a generator's state.

torch tags the operations that draw from a generator (`nondeterministic_seeded`). Under `Draws` each
of them uses 64 bits for every element instead, and each element's bits are a hash:

    key       BLAKE2b of "{seed}/{step}/{layer}" in 8 bytes, little-endian; of the k-th further
              tensor that the layer draws in one call, "{seed}/{step}/{layer}#{k}", from 1
    b         the element's sample: its index in the global batch of the step; 0 in a tensor that
              does not depend on the batch
    e         the element's index in its sample: its flat index in the tensor that a batch of this
              sample alone would draw
    mix(z)    z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27
    bits      mix(mix(b + key) ^ (e * 0x9E3779B97F4A7C15))

All of it modulo 2^64, with logical shifts. So sharding, micro-batches, rounds and recomputation do
not change what is drawn. With

    h = bits >> 32             u = h / 2^32     v = (h + 1/2) / 2^32
    w = (mix(bits + 0x9E3779B97F4A7C15) >> 32) / 2^32

every distribution is computed in float64, and rounded to the type of the tensor:

    bernoulli(p)           1 where h >= round((1 - p) 2^32), half to even
    uniform(a, b)          a + (b - a) u', u' being u truncated to the digits of the tensor's type
                           (24 of float32, 11 of float16, 8 of bfloat16, all 32 of float64)
    normal(m, s)           m + s sqrt(-2 ln v) cos(2 pi w)
    log_normal(m, s)       exp of normal(m, s)
    exponential(r)         -ln(v) / r
    cauchy(m, s)           m + s tan(pi (v - 1/2))
    geometric(p)           max(1, ceil(ln v / ln(1 - p)))
    integers from a to b   a + (h (b - a) >> 32), b itself excluded

    dropout(p)             bernoulli(1 - p) / (1 - p); noise of rrelu(a, b): uniform(a, b)

Source: SplitMix64's finalizer (Steele, Lea and Flood 2014), Box and Muller 1958.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.model.errors import TraceError
from workbench.model.record.batch import BATCHES

aten: Any = torch.ops.aten

Shapes = list[torch.Size]
"""The shapes of the random tensors that one operation draws, in order."""

INDEPENDENT = -1
_Generator = torch.Generator
_GOLDEN = 0x9E3779B97F4A7C15
_UNIT = 2**32


def is_random(operation: OpOverload) -> bool:
    """Whether an operation can draw from a generator; attention does so for dropout alone."""
    return torch.Tag.nondeterministic_seeded in operation.tags


def can_draw(operation: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call can draw from a generator: attention without dropout does not."""
    if not is_random(operation):
        return False
    names = [argument.name for argument in operation._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


def hashed(key: int, samples: Tensor, elements: Tensor) -> Tensor:
    """64 bits for each (sample, index in its sample), as int64."""
    return _mix(_mix(samples + _signed(key)) ^ (elements * _signed(_GOLDEN)))


class Held(NamedTuple):
    """The part of a random tensor that is drawn, of a dimension that is cut into equal pieces.

    Attributes:
        dim: the dimension, which is not that of the rows.
        first: the first piece that is drawn.
        number: the number of pieces that are drawn.
        pieces: the number of all pieces.
    """

    dim: int
    first: int
    number: int
    pieces: int


def placed_bits(
    key: int, shape: torch.Size, dim: int, samples: Tensor, held: Held | None = None
) -> Tensor:
    """64 bits for each element of a random tensor, as int64 [shape].

    Along `dim` the rows of a sample are adjacent; `INDEPENDENT`: along none. `held` is the part of
    it that has this shape.

    Raises:
        TraceError: the shape is not that of a part with so many pieces.
    """
    if held is not None and (dim == INDEPENDENT or shape[held.dim] % held.number):
        raise TraceError(f"a random tensor of shape {tuple(shape)} is not cut as {held} says")
    if dim == INDEPENDENT:
        elements = torch.arange(shape.numel(), device=samples.device)
        return hashed(key, torch.zeros_like(elements), elements).view(shape)
    rows = shape[dim] // max(len(samples), 1)
    before, behind = shape[:dim].numel(), shape[dim + 1 :].numel()
    if held is None:
        elements = torch.arange(before * rows * behind, device=samples.device)
    else:
        each, whole = shape[held.dim] // held.number, [*shape[:dim], rows, *shape[dim + 1 :]]
        whole[held.dim] = each * held.pieces
        elements = torch.arange(math.prod(whole), device=samples.device).view(whole)
        elements = elements.narrow(held.dim, each * held.first, each * held.number)
        elements = elements.reshape(-1)
    bits = hashed(key, samples.view(1, -1, 1, 1), elements.view(before, 1, rows, behind))
    return bits.reshape(shape)


def kept(bits: Tensor, p: float | Tensor) -> Tensor:
    """A mask that is True with probability p for each element."""
    dropped = 1.0 - p
    if isinstance(dropped, Tensor):
        return _upper(bits).double() >= (dropped.double() * _UNIT).round()
    return _upper(bits) >= round(dropped * _UNIT)


def _upper(bits: Tensor) -> Tensor:
    return _shifted(bits, 32)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    return z ^ _shifted(z, 27)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's shift of a negative number copies its sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


class Draws(TorchDispatchMode):
    """Makes every random tensor from the bits that a subclass gives; entered by `drawing`.

    A draw that it does not support is a `TraceError`.
    """

    def bits(self, shape: torch.Size, device: torch.device) -> Tensor:
        """64 bits for each element of the next tensor drawn, as int64; subclasses implement it."""
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = _MADE.get(func)
        if made is not None:
            kwargs.pop("generator", None)
            return made(self, *(arg for arg in args if not isinstance(arg, _Generator)), **kwargs)
        if torch.is_inference_mode_enabled() and func._can_decompose():
            with self:  # its parts may draw
                return func.decompose(*args, **kwargs)
        if is_random(func):
            raise TraceError(
                f"{func} draws random numbers in a way that no other split of the batch could "
                f"repeat: {_remedy(func)}"
            )
        return func(*args, **kwargs)

    def uniform(self, like: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
        digits = min(32, round(1 - math.log2(torch.finfo(like.dtype).eps)))
        cut = _upper(self._bits(like)) >> (32 - digits)
        return low + (high - low) * (cut.double() / 2**digits)

    def normal(self, like: Tensor, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
        bits = self._bits(like)
        angle = _upper(_mix(bits + _signed(_GOLDEN))).double() * (2 * math.pi / _UNIT)
        return mean + std * ((-2 * _open(bits).log()).sqrt() * angle.cos())

    def open_uniform(self, like: Tensor) -> Tensor:
        """Values between 0 and 1, both excluded."""
        return _open(self._bits(like))

    def kept(self, like: Tensor, p: float | Tensor) -> Tensor:
        return kept(self._bits(like), p)

    def integers(self, like: Tensor, low: int, high: int) -> Tensor:
        if not 0 < high - low <= 2**31:
            raise TraceError(f"integers from {low} to {high} are drawn: at most 2**31 are possible")
        return low + _shifted(_upper(self._bits(like)) * (high - low), 32)

    def _bits(self, like: Tensor) -> Tensor:
        if like.is_complex():
            raise TraceError(
                f"a random tensor of {like.dtype} is drawn: draw its parts, and join them by "
                "torch.complex"
            )
        return self.bits(like.shape, like.device)


@contextmanager
def drawing(draws: Draws) -> Iterator[None]:
    """Makes all random tensors with `draws`.

    Attention and recurrent layers are computed step by step: the fused kernels of torch and cuDNN
    would draw inside.
    """
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False), draws:
        yield


class RecordedDraws(Draws):
    """Records the shape of every tensor drawn, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Shapes = []

    def bits(self, shape: torch.Size, device: torch.device) -> Tensor:
        self.shapes.append(shape)
        return torch.zeros(shape, dtype=torch.int64, device=device)


def dims_of(at_two: Shapes, at_three: Shapes) -> tuple[int, ...]:
    """The dimension of the batch in each of an operation's random tensors; or `INDEPENDENT`.

    Raises:
        TraceError: a tensor has no rows that belong to each sample.
    """
    if len(at_two) != len(at_three):
        raise TraceError(
            f"{len(at_two)} random tensors are drawn for a batch of {BATCHES[0]}, {len(at_three)} "
            f"for {BATCHES[1]}: draw one tensor that has rows for every sample"
        )
    return tuple(map(_dim, at_two, at_three))


def _dim(small: torch.Size, large: torch.Size) -> int:
    if small == large:
        return INDEPENDENT
    differ = [dim for dim, (a, b) in enumerate(zip(small, large, strict=False)) if a != b]
    dim = differ[0]
    rows, rest = divmod(small[dim], BATCHES[0])
    if len(small) != len(large) or len(differ) > 1 or rest or large[dim] != rows * BATCHES[1]:
        raise TraceError(
            f"a random tensor of shape {tuple(small)} for a batch of {BATCHES[0]}, "
            f"{tuple(large)} for {BATCHES[1]}, does not have the same number of rows for each "
            "sample: draw a tensor whose first dimension is the batch, torch.rand(len(x), ...)"
        )
    return dim


def _open(bits: Tensor) -> Tensor:
    return (_upper(bits).double() + 0.5) / _UNIT


def _remedy(operation: OpOverload) -> str:
    name = str(operation._schema.name).removeprefix("aten::").strip("_")
    return _REMEDIES.get(
        name,
        "make it of torch.rand, torch.randn, torch.bernoulli, torch.randint or F.dropout",
    )


_REMEDIES = {
    "multinomial": "take the argmax of log-probabilities plus F.gumbel_softmax's noise, "
    "-torch.empty_like(logits).exponential_().log()",
    "randperm": "sort random numbers, torch.rand(n).argsort()",
}


# One function for each operation that draws, with the operation's own arguments.


def _bernoulli(draws: Draws, x: Tensor, p: float | None = None) -> Tensor:
    return torch.empty_like(x).copy_(draws.kept(x, x if p is None else p))


def _bernoulli_(draws: Draws, x: Tensor, p: float | Tensor = 0.5) -> Tensor:
    return x.copy_(draws.kept(x, p))


def _native_dropout(draws: Draws, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = draws.kept(x, 1.0 - p)
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    return x * mask * scale, mask


def _rrelu(
    draws: Draws,
    x: Tensor,
    noise: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
) -> Tensor:
    if not training:
        return torch.where(x > 0, x, x * ((lower + upper) / 2))
    ones = torch.ones((), dtype=torch.float64, device=x.device)
    noise.copy_(torch.where(x > 0, ones, draws.uniform(x, lower, upper)))
    return x * noise


def _rrelu_(draws: Draws, x: Tensor, noise: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x.copy_(_rrelu(draws, x, noise, *args, **kwargs))


def _uniform_(draws: Draws, x: Tensor, low: float = 0.0, high: float = 1.0, **named: Any) -> Tensor:
    low, high = named.get("from", low), named.get("to", high)
    return x.copy_(draws.uniform(x, low, high))


def _normal_(draws: Draws, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return x.copy_(draws.normal(x, mean, std))


def _normal(draws: Draws, mean: Any, std: Any = 1.0) -> Tensor:
    like = mean + std
    return torch.empty_like(like).copy_(draws.normal(like, mean, std))


def _normal_of_size(
    draws: Draws, mean: float, std: float, size: list[int], **options: Any
) -> Tensor:
    return _normal_(draws, torch.empty(size, **options), mean, std)


def _log_normal_(draws: Draws, x: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return x.copy_(draws.normal(x, mean, std).exp())


def _exponential_(draws: Draws, x: Tensor, lambd: float = 1.0) -> Tensor:
    return x.copy_(-draws.open_uniform(x).log() / lambd)


def _cauchy_(draws: Draws, x: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return x.copy_(median + sigma * (math.pi * (draws.open_uniform(x) - 0.5)).tan())


def _geometric_(draws: Draws, x: Tensor, p: float) -> Tensor:
    none = math.log1p(-p) if p < 1 else -math.inf
    return x.copy_((draws.open_uniform(x).log() / none).ceil().clamp(min=1))


def _random_(draws: Draws, x: Tensor, *limits: int | None, **named: int | None) -> Tensor:
    low, high = (0, *limits, *named.values())[-2:]
    if low is None or high is None:
        raise TraceError("Tensor.random_ without an upper limit is not supported: give it one")
    return x.copy_(draws.integers(x, low, high))


def _rand(draws: Draws, size: list[int], **options: Any) -> Tensor:
    return _uniform_(draws, torch.empty(size, **options))


def _randn(draws: Draws, size: list[int], **options: Any) -> Tensor:
    return _normal_(draws, torch.empty(size, **options))


def _rand_like(draws: Draws, x: Tensor, **options: Any) -> Tensor:
    return _uniform_(draws, torch.empty_like(x, **options))


def _randn_like(draws: Draws, x: Tensor, **options: Any) -> Tensor:
    return _normal_(draws, torch.empty_like(x, **options))


def _randint(draws: Draws, high: int, size: list[int], **options: Any) -> Tensor:
    return _randint_between(draws, 0, high, size, **options)


def _randint_between(draws: Draws, low: int, high: int, size: list[int], **options: Any) -> Tensor:
    options["dtype"] = options.get("dtype") or torch.int64
    return _random_(draws, torch.empty(size, **options), low, high)


def _randint_like(draws: Draws, x: Tensor, *limits: int, **options: Any) -> Tensor:
    return _random_(draws, torch.empty_like(x, **options), *limits)


_MADE: dict[Any, Callable[..., Any]] = {
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli_.float: _bernoulli_,
    aten.bernoulli_.Tensor: _bernoulli_,
    aten.native_dropout.default: _native_dropout,
    aten.rrelu_with_noise.default: _rrelu,
    aten.rrelu_with_noise_.default: _rrelu_,
    aten.uniform_.default: _uniform_,
    aten.normal_.default: _normal_,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.normal.float_float: _normal_of_size,
    aten.log_normal_.default: _log_normal_,
    aten.exponential_.default: _exponential_,
    aten.cauchy_.default: _cauchy_,
    aten.geometric_.default: _geometric_,
    getattr(aten.random_, "from"): _random_,
    aten.random_.to: _random_,
    aten.rand.default: _rand,
    aten.rand.generator: _rand,
    aten.randn.default: _randn,
    aten.randn.generator: _randn,
    aten.rand_like.default: _rand_like,
    aten.rand_like.generator: _rand_like,
    aten.randn_like.default: _randn_like,
    aten.randn_like.generator: _randn_like,
    aten.randint.default: _randint,
    aten.randint.generator: _randint,
    aten.randint.low: _randint_between,
    aten.randint.low_generator: _randint_between,
    aten.randint_like.default: _randint_like,
    aten.randint_like.generator: _randint_like,
    aten.randint_like.low_dtype: _randint_like,
    aten.randint_like.low_generator_dtype: _randint_like,
}
