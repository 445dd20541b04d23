"""Random numbers of one process that no split can change, written down a second time.

A draw is a function of (seed, step, layer, row of the sample in the global batch, element in the
sample). Whatever torch would draw while a module runs is given by that instead, at the level of
torch's own operators, so that a module keeps its own code.

    key      = blake2b("seed/step/layer", 8 bytes, little endian)
    z        = mix(mix(row + key) xor (element * 0x9E3779B97F4A7C15))        of 64 bits
    uniform  = the upper 32 bits of z
    kept     where uniform >= round(p * 2^32)
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xBF58476D1CE4E5B9)


class NotSpecifiedError(Exception):
    """A module draws in a way that no specification says how to repeat."""


def key_of(seed: int, step: int, layer: str) -> np.uint64:
    content = f"{seed}/{step}/{layer}".encode()
    return np.uint64(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little"))


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * FIRST
    return z ^ (z >> np.uint64(27))


def bits(key: np.uint64, rows: np.ndarray, elements: np.ndarray) -> np.ndarray:
    """32 random bits for each (row, element): [rows, elements]."""
    with np.errstate(over="ignore"):
        mixed = _mix(rows.astype(np.uint64)[:, None] + key)
        z = _mix(mixed ^ (elements.astype(np.uint64)[None, :] * GOLDEN))
    return z >> np.uint64(32)


def kept(key: np.uint64, rows: np.ndarray, elements: np.ndarray, p: float) -> np.ndarray:
    return bits(key, rows, elements) >= np.uint64(round(p * 2**32))


class Draws(TorchDispatchMode):
    """Gives every draw of a module's forward pass.

    Args:
        module: whose forward pass runs under this.
        layers: names of the layers that draw, in the order in which they run: the path of a
            submodule, with "@n" from its second call on, or any other name for a function.
        seed: of the run.
    """

    def __init__(self, module: nn.Module, layers: Sequence[str], seed: int) -> None:
        super().__init__()
        self.seed, self.step, self.first_row, self.samples = seed, 0, 0, 0
        paths = dict(module.named_modules())
        self.functions = [name for name in layers if name.partition("@")[0] not in paths]
        self.calls: Counter[str] = Counter()
        self.inside: list[str] = []
        self.next_function = 0
        for path in {name.partition("@")[0] for name in layers}.intersection(paths):
            paths[path].register_forward_pre_hook(lambda *_, path=path: self._enter(path))
            paths[path].register_forward_hook(lambda *_: self._leave())

    def start(self, step: int, first_row: int, samples: int) -> None:
        """Announces the rows of the next forward pass."""
        self.step, self.first_row, self.samples = step, first_row, samples
        self.calls.clear()
        self.next_function = 0

    def _enter(self, path: str) -> None:
        self.calls[path] += 1
        count = self.calls[path]
        self.inside.append(path if count == 1 else f"{path}@{count}")

    def _leave(self) -> None:
        self.inside.pop()

    def _name(self) -> str:
        if self.inside:
            return self.inside[0]
        if self.next_function == len(self.functions):
            raise NotSpecifiedError("a function draws that no layer is named for")
        self.next_function += 1
        return self.functions[self.next_function - 1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bernoulli_.float:
            return args[0].copy_(self._kept(args[0], 1.0 - args[1]))
        before = torch.get_rng_state()
        found = func(*args, **(kwargs or {}))
        if torch.equal(before, torch.get_rng_state()):
            return found  # it could, and did not: attention that drops nothing
        raise NotSpecifiedError(f"{func} draws, and no specification says how")

    def _kept(self, noise: Tensor, p: float) -> Tensor:
        """Of a noise tensor [samples * per sample, ...]: 1 where it lives, else 0."""
        name = self._name()
        per_sample, left = divmod(noise.shape[0], self.samples)
        if left:
            raise NotSpecifiedError(f"{name!r} draws {tuple(noise.shape)} for {self.samples} rows")
        first = self.first_row * per_sample
        rows = np.arange(first, first + noise.shape[0])
        elements = np.arange(noise[0].numel())
        found = kept(key_of(self.seed, self.step, name), rows, elements, p)
        return torch.from_numpy(found).view(noise.shape).to(noise.dtype)
