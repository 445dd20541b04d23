"""What gradients are after they went through a codec, on arrays small enough to do so at once.

The same values as `workbench.comm.codecs` gives, which do it on tensors that travel.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from workbench.plan.codec import Codec

Array = NDArray[np.float32]


def coded(pieces: Array, codec: Codec) -> Array:
    """What is decoded of pieces [pieces, values], each of which was encoded by itself."""
    rounded: dict[str, Callable[[Array], Array]] = {
        "fp16": lambda x: x.astype(np.float16).astype(np.float32),
        "bf16": _bf16,
        "bf16_truncated": lambda x: (x.view(np.uint32) & 0xFFFF0000).view(np.float32),
        "int8": partial(_multiples, most=127, chunk=codec.chunk),
        "int4": partial(_multiples, most=7, chunk=codec.chunk),
        "top_k": partial(_largest, kept=codec.kept(pieces.shape[1])),
    }
    return rounded[codec.name](np.ascontiguousarray(pieces, dtype=np.float32))


class Sum:
    """All-reduces of workers' gradients by "direct", whose pieces go through a codec.

    The owner of a segment adds its own part as it is to those that it decodes, and encodes the
    sum for all, itself included; a codec with error feedback gets what was left out the next time.

    Args:
        codec: None: nothing is lost.
        workers: who sum.
        length: of a gradient; a multiple of `workers`.
    """

    def __init__(self, codec: Codec | None, workers: int, length: int) -> None:
        self._codec, self._workers = codec, workers
        self._segments = (workers, workers, length // workers)
        self._residuals = np.zeros(self._segments, dtype=np.float32)  # [worker, segment, values]

    def __call__(self, gradients: Array) -> Array:
        """The sum over workers, of [workers, length], as all of them have it."""
        if self._codec is None or self._workers == 1:
            return gradients.sum(axis=0)
        own = np.arange(self._workers)
        parts = gradients.reshape(self._segments)
        given = parts + self._residuals
        sent = coded(given.reshape(-1, given.shape[2]), self._codec).reshape(self._segments)
        sent[own, own] = parts[own, own]
        total = sent.sum(axis=0) + self._residuals[own, own]
        found = coded(total, self._codec)
        if self._codec.error_feedback:
            self._residuals = given - sent
            self._residuals[own, own] = total - found
        return found.reshape(-1)


def _bf16(x: Array) -> Array:
    """The nearest value, of two the even one."""
    bits = x.view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _multiples(x: Array, most: int, chunk: int) -> Array:
    found = np.empty_like(x)
    for start in range(0, x.shape[1], chunk):
        part = x[:, start : start + chunk]
        scale = np.abs(part).max(axis=1, keepdims=True) / np.float32(most)
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
        found[:, start : start + chunk] = np.rint(part * inverse) * scale
    return found


def _largest(x: Array, kept: int) -> Array:
    found = np.zeros_like(x)
    places = np.argpartition(-np.abs(x), kept - 1, axis=1)[:, :kept]
    np.put_along_axis(found, places, np.take_along_axis(x, places, axis=1), axis=1)
    return found
