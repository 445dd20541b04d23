"""Tries a user's own data set and collate function, before engines are used.

Each rank has a copy of both and reads its own rows, in an order that follows from the plan. So a
sample must be the same whenever it is read, after whatever others, and a batch must be made of its
samples one by one.
"""

import itertools
import time

import torch

from workbench.model.tracing.state.python_state import Walk, moved
from workbench.train.data.copied import copied
from workbench.train.data.own_samples import OwnSamples
from workbench.train.data.reading import ANOTHER, DataError, Streamed, digest

SAMPLES = 8
COUNT_WITHIN_S = 0.5
"""How long a stream is read to see whether it is as long as it was said to be."""
SHARED_BYTES = 2**16
"""From this size on, tensors of a data set are not copied to see what it remembers."""


def try_samples(data: OwnSamples) -> None:
    """Reads some samples again, and by a copy that has read no others; and collates them so.

    Raises:
        DataError: a sample is another one when it is read again, or changes what the data set
            remembers; the collate function mixes rows, draws at random or keeps state; or a stream
            has another length than it was said to have.
    """
    count = min(SAMPLES, len(data))
    spread = 1 if data.is_stream else len(data) / count
    indices = (torch.arange(count) * spread).long()
    fresh = copied(data, shared_bytes=SHARED_BYTES)
    collates = [copied(data.collate) for _ in range(2)]
    first = data.read(indices, 0)
    before = _state(data)
    again = data.read(indices, 0) if data.is_stream else data.read(indices.flip(0), 0)[::-1]
    changed = moved(before, _state(data))
    said = f" (reading changes {', '.join(changed)})" if changed else ""
    for index, one, two in zip(indices.tolist(), first, again, strict=True):
        if digest(one) != digest(two):
            raise DataError(f"{data.name}: sample {index}{said} {ANOTHER}")
    if changed:
        raise DataError(
            f"{data.name} keeps state: reading the same samples again changes "
            f"{', '.join(changed)}. Each rank, and each of its workers, has a copy of its own, "
            "which reads other samples: let a sample follow from its index, and from set_epoch"
        )
    later = data.read(indices, 1)
    first_read = fresh.read(indices, 1) if data.is_stream else fresh.read(indices.flip(0), 1)[::-1]
    for index, one, two in zip(indices.tolist(), later, first_read, strict=True):
        if digest(one) != digest(two):
            raise DataError(f"{data.name}: sample {index}, after others, {ANOTHER}")
    data.fitting(first)
    if data.collates:
        halves = first[: count // 2], first[count // 2 :]
        for alone, half in zip(collates, halves, strict=True):
            if half and digest(data.collate(half)) != digest(alone(half)):
                raise DataError(
                    f"{data.name}: the collate function keeps state: after others, samples are "
                    "another batch. Each rank has a copy of its own, which collates other rows"
                )
    if isinstance(data.samples, Streamed):
        _count(data.samples)


def _state(data: OwnSamples) -> dict[str, object]:
    return Walk().of(data.samples.data, "it")


def _count(stream: Streamed) -> None:
    """Reads a stream to its end, if that is soon."""
    end = time.monotonic() + COUNT_WITHIN_S
    for index in itertools.count(SAMPLES):
        if index >= len(stream) or time.monotonic() > end:
            return
        stream.__getitems__([(0, index)])
