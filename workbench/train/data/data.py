"""Labelled images for one rank, and the order in which steps take them."""

from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from workbench.plan.experiment import CIFAR10, Data, Digits, ImageFolder, Synthetic
from workbench.train.data import cifar10, digits, image_folder, synthetic
from workbench.train.data.pixels import DataError

__all__ = ["DataError", "Dataset", "Split", "open_data", "order", "rows_of_step"]

Split = Literal["train", "test"]


class Dataset(Protocol):
    """One split: numbered samples, made ready for the model when they are asked for.

    The same index gives the same bits on every rank and in every batch.
    """

    num_classes: int

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """(float32 images [n, *input_shape], normalized; int64 labels [n]); n may be 0."""
        ...


def open_data(data: Data, input_shape: tuple[int, ...], num_classes: int, split: Split) -> Dataset:
    """The data set that a value names, fitted to a model.

    Args:
        data: the value, as an `Experiment` holds it.
        input_shape: the model's, for one sample: (channels, height, width).
        num_classes: the model's.
        split: "train" or "test".

    Raises:
        DataError: the files are not there, or the data does not fit the model.
    """
    opened: Dataset
    match data:
        case Synthetic():
            opened = synthetic.Centres(data, input_shape, split)
        case Digits():
            opened = digits.EightByEight(_picture(data, input_shape), split)
        case CIFAR10():
            opened = cifar10.Pictures(data, _picture(data, input_shape), split)
        case ImageFolder():
            opened = image_folder.Files(data, _picture(data, input_shape), split)
    if opened.num_classes != num_classes:
        raise DataError(
            f"{data!r} has {opened.num_classes} classes, the model {num_classes}; "
            f"trace it with num_classes={opened.num_classes}"
        )
    return opened


def order(seed: int, epoch: int, length: int) -> Tensor:
    """The permutation of all `length` samples that epoch `epoch` goes through."""
    return torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(length))


def rows_of_step(length: int, batch_size: int, seed: int, step: int) -> Tensor:
    """Indices of the global batch of step `step` (from 0), the same on every rank.

    An epoch has ceil(length / batch_size) steps, of which the last may be short: each sample
    comes exactly once an epoch.
    """
    epoch, position = divmod(step, -(-length // batch_size))
    return order(seed, epoch, length)[position * batch_size : (position + 1) * batch_size]


def _picture(data: Data, input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(input_shape) != 3:
        raise DataError(f"{data!r} gives (channels, height, width), the model reads {input_shape}")
    channels, height, width = input_shape
    return channels, height, width
