"""Random numbers of one process that no split can change, written down a second time.

Whatever torch would draw while a module runs is given by the place of each element instead, at the
level of torch's own operators, so that the module keeps its own code. From the words of the
library (`model/tracing/draws.py`), and not from its code:

    key     BLAKE2b of "seed/step/layer", 8 bytes, little endian; "seed/step/layer#k" of the k-th
            further tensor of one call
    b, e    the sample's index in the step's batch (0 where the tensor does not depend on the
            batch); the element's flat index in what this sample alone would draw
    mix(z)  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27
    bits    mix(mix(b + key) ^ (e * 0x9E3779B97F4A7C15)), modulo 2^64

The distributions are computed in float64 from h = bits >> 32 and h' = mix(bits + 0x9E37...) >> 32.
"""

import copy
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FACTOR = np.uint64(0xBF58476D1CE4E5B9)
UNIT = 2.0**32
HALF = np.uint64(32)
aten: Any = torch.ops.aten

NOWHERE = -1
"""Instead of the dimension in which a drawn tensor has the batch: it depends on no sample."""


class NotSpecifiedError(Exception):
    """A module draws in a way that no specification says how to repeat."""


def key_of(seed: int, step: int, layer: str, index: int) -> np.uint64:
    further = f"#{index}" if index else ""
    content = f"{seed}/{step}/{layer}{further}".encode()
    return np.uint64(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little"))


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * FACTOR
    return z ^ (z >> np.uint64(27))


class Bits:
    """64 bits for each element of one drawn tensor.

    Args:
        key: of the layer and step.
        shape: of the tensor.
        dim: in which it has the batch.
        first: index of its first sample in the batch.
        samples: how many it has.
    """

    def __init__(
        self, key: np.uint64, shape: Sequence[int], dim: int, first: int, samples: int
    ) -> None:
        index = np.indices(tuple(shape), dtype=np.int64) if shape else np.zeros((0,), np.int64)
        sample, element = np.zeros(tuple(shape), np.int64), np.zeros(tuple(shape), np.int64)
        for d, length in enumerate(shape):
            if d == dim:
                rows, left = divmod(length, samples)
                assert not left
                sample = first + index[d] // rows
                element = element * rows + index[d] % rows
            else:
                element = element * length + index[d]
        with np.errstate(over="ignore"):
            start = _mix(sample.astype(np.uint64) + key)
            self.bits = _mix(start ^ (element.astype(np.uint64) * GOLDEN))
            self.second = (_mix(self.bits + GOLDEN) >> HALF).astype(np.float64) / UNIT
        self.upper = self.bits >> HALF

    def kept(self, p: float) -> np.ndarray:
        """1 with probability p."""
        return (self.upper >= np.uint64(round((1.0 - p) * UNIT))).astype(np.float64)

    def uniform(self, low: float, high: float, digits: int) -> np.ndarray:
        cut = (self.upper >> np.uint64(32 - digits)).astype(np.float64) / 2.0**digits
        return low + (high - low) * cut

    def normal(self, mean: float, std: float) -> np.ndarray:
        radius = np.sqrt(-2.0 * np.log((self.upper.astype(np.float64) + 0.5) / UNIT))
        return mean + std * radius * np.cos(2.0 * math.pi * self.second)


class Draws(TorchDispatchMode):
    """Gives every draw of a module's forward pass.

    Args:
        module: whose forward pass runs under this.
        layers: the layers that draw, in the order in which they run, and how many tensors each
            draws: by the path of a submodule, with "@n" from its second call on, or by any other
            name for a function.
        seed: of the run.
        dims: the dimension of the batch in each tensor, in the order in which they are drawn.
    """

    def __init__(
        self, module: nn.Module, layers: Mapping[str, int], seed: int, dims: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.layers, self.seed, self.dims = layers, seed, dims
        self.shapes: list[tuple[int, ...]] = []
        self.step, self.first_row, self.samples = 0, 0, 0
        paths = dict(module.named_modules())
        self.functions = [name for name in layers if name.partition("@")[0] not in paths]
        self.calls: Counter[str] = Counter()
        self.drawn: Counter[str] = Counter()
        self.inside: list[str] = []
        for path in {name.partition("@")[0] for name in layers}.intersection(paths):
            paths[path].register_forward_pre_hook(lambda *_, path=path: self._enter(path))
            paths[path].register_forward_hook(lambda *_: self._leave())

    def start(self, step: int, first_row: int, samples: int) -> None:
        """Announces the rows of the next forward pass."""
        self.step, self.first_row, self.samples = step, first_row, samples
        self.calls.clear()
        self.drawn.clear()
        self.shapes.clear()

    def _enter(self, path: str) -> None:
        self.calls[path] += 1
        count = self.calls[path]
        self.inside.append(path if count == 1 else f"{path}@{count}")

    def _leave(self) -> None:
        self.inside.pop()

    def _next(self) -> tuple[str, int]:
        """The layer that draws now, and which of its tensors."""
        waiting = self.inside[:1] or [
            name for name in self.functions if self.drawn[name] < self.layers[name]
        ]
        name = waiting[0] if waiting else ""
        if name not in self.layers or self.drawn[name] == self.layers[name]:
            raise NotSpecifiedError(f"{name or 'a function'} draws more than was said of it")
        self.drawn[name] += 1
        return name, self.drawn[name] - 1

    def _bits(self, shape: Sequence[int]) -> Bits:
        name, index = self._next()
        key = key_of(self.seed, self.step, name, index)
        dim = self.dims[len(self.shapes)] if self.dims else NOWHERE
        self.shapes.append(tuple(shape))
        return Bits(key, shape, dim, self.first_row, self.samples)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in MADE:
            return MADE[func](self, *args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = torch.get_rng_state()
        found = func(*args, **kwargs)
        if torch.equal(before, torch.get_rng_state()):
            return found  # it could, and did not: attention that drops nothing
        raise NotSpecifiedError(f"{func} draws, and no specification says how")

    def fill(self, x: Tensor, value: Callable[[Bits], np.ndarray]) -> Tensor:
        """The tensor, filled in place."""
        return x.copy_(torch.from_numpy(np.asarray(value(self._bits(x.shape)))))


def dims_of(module: nn.Module, layers: Mapping[str, int], inputs: Tensor) -> list[int]:
    """The dimension of the batch in each tensor that is drawn: the one that follows its size."""
    shapes = []
    for rows in (2, 3):
        copied = copy.deepcopy(module)
        draws = Draws(copied, layers, seed=0)
        draws.start(0, 0, rows)
        with draws, torch.no_grad():
            copied(inputs[:1].repeat(rows, *[1] * (inputs.ndim - 1)))
        shapes.append(draws.shapes)
    return [
        next((dim for dim, (a, b) in enumerate(zip(few, many, strict=True)) if a != b), NOWHERE)
        for few, many in zip(*shapes, strict=True)
    ]


def _digits(x: Tensor) -> int:
    return {torch.float64: 32, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[x.dtype]


def _bernoulli_(draws: Draws, x: Tensor, p: float = 0.5) -> Tensor:
    return draws.fill(x, lambda bits: bits.kept(p))


def _rand_like(draws: Draws, x: Tensor, **_: Any) -> Tensor:
    return draws.fill(torch.empty_like(x), lambda bits: bits.uniform(0.0, 1.0, _digits(x)))


def _rand(draws: Draws, size: list[int], *, dtype: Any = None, **_: Any) -> Tensor:
    x = torch.empty(size, dtype=dtype)
    return draws.fill(x, lambda bits: bits.uniform(0.0, 1.0, _digits(x)))


def _randn_like(draws: Draws, x: Tensor, **_: Any) -> Tensor:
    return draws.fill(torch.empty_like(x), lambda bits: bits.normal(0.0, 1.0))


def _randn(draws: Draws, size: list[int], *, dtype: Any = None, **_: Any) -> Tensor:
    return draws.fill(torch.empty(size, dtype=dtype), lambda bits: bits.normal(0.0, 1.0))


def _rrelu(
    draws: Draws, x: Tensor, noise: Tensor, low: float, high: float, training: bool = False
) -> Tensor:
    if not training:
        return torch.where(x > 0, x, x * ((low + high) / 2))
    draws.fill(noise, lambda bits: bits.uniform(low, high, _digits(x)))
    noise.copy_(torch.where(x > 0, torch.ones_like(x), noise))
    return x * noise


MADE = {
    aten.bernoulli_.float: _bernoulli_,
    aten.rand_like.default: _rand_like,
    aten.rand.default: _rand,
    aten.randn_like.default: _randn_like,
    aten.randn.default: _randn,
    aten.rrelu_with_noise.default: _rrelu,
}
