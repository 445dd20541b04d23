"""The order in which steps take samples: a function of the seed and the epoch."""

import numpy as np
import torch
from torch import Tensor

# Of an epoch that is none: the test split is read alike whenever it is evaluated.
EVALUATION = -1


def order(seed: int | None, epoch: int, length: int) -> Tensor:
    """The permutation of all samples that an epoch goes through; with no seed, as they come."""
    if seed is None:
        return torch.arange(length)
    return torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(length))


def rows_of_step(length: int, batch_size: int, seed: int | None, step: int) -> Tensor:
    """Indices of the global batch of step `step` (from 0), the same on every rank.

    An epoch has ceil(length / batch_size) steps, of which the last may be short: each sample
    comes exactly once an epoch.
    """
    epoch, position = divmod(step, -(-length // batch_size))
    return order(seed, epoch, length)[position * batch_size : (position + 1) * batch_size]


def length_of_step(length: int, batch_size: int, step: int) -> int:
    """How many samples the global batch of step `step` has."""
    position = step % -(-length // batch_size)
    return min(batch_size, length - position * batch_size)


def epoch_of(length: int, batch_size: int, step: int) -> int:
    """The epoch, from 0, that step `step` belongs to."""
    return step // -(-length // batch_size)
