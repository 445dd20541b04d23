"""Opens the data set that an experiment names."""

from typing import Any, Literal, Protocol

from torch import Tensor

from workbench.plan.experiment.experiment import (
    CIFAR10,
    Data,
    Digits,
    ImageFolder,
    Synthetic,
    TorchData,
)
from workbench.plan.experiment.task import Text
from workbench.train.data.built_in import Bytes, Centres, EightByEight, Files, Pictures, Sequences
from workbench.train.data.own_samples import OwnSamples
from workbench.train.data.reading import DataError

Split = Literal["train", "test"]


class Dataset(Protocol):
    """One split: numbered samples, made ready for the model when they are asked for.

    The same index gives the same bits on every rank and in every batch of an epoch.
    """

    @property
    def num_classes(self) -> int | None:
        """The number of classes; None: nobody knows, or targets are no classes."""
        ...

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor, epoch: int = ...) -> tuple[Tensor, Any]:
        """(inputs [n, *input_shape], targets); n may be 0.

        Inputs of the built-in ones are float32 and normalized, and targets int64 labels [n]; other
        targets are any nesting of tensors [n, ...].
        """
        ...


def open_data(
    data: Data,
    input_shape: tuple[int, ...],
    num_classes: int,
    split: Split,
    seed: int = 0,
    vocabulary: int | None = None,
    per_token: bool = False,
) -> Dataset:
    """The data set that a value names, fitted to a model.

    Args:
        data: the value, as an `Experiment` holds it.
        input_shape: the shape of one of the model's samples: (channels, height, width).
        num_classes: the model's number of classes.
        split: "train" or "test".
        seed: the experiment's, for what the user's own data draws at random.
        vocabulary: the number of tokens, if the model reads token ids.
        per_token: whether it scores classes for each of them, so that labels are the next tokens.

    Raises:
        DataError: the files are not there, or the data does not fit the model.
        OwnObjectError: the user's own data cannot be loaded here.
    """
    opened: Dataset
    match data:
        case Synthetic() if vocabulary is not None:
            opened = Sequences(data, input_shape, split, vocabulary, per_token=per_token)
        case Synthetic():
            opened = Centres(data, input_shape, split)
        case Text():
            opened = Bytes(data, input_shape, num_classes, split, vocabulary, per_token=per_token)
        case Digits():
            opened = EightByEight(_picture(data, input_shape, vocabulary), split)
        case CIFAR10():
            opened = Pictures(data, _picture(data, input_shape, vocabulary), split)
        case ImageFolder():
            opened = Files(data, _picture(data, input_shape, vocabulary), split)
        case TorchData():
            return OwnSamples(data, split, input_shape, seed, vocabulary)
    if opened.num_classes not in (None, num_classes):
        raise DataError(
            f"{data!r} has {opened.num_classes} classes, the model {num_classes}; "
            f"trace it with num_classes={opened.num_classes}"
        )
    return opened


def order_seed(data: Dataset, seed: int) -> int | None:
    """The seed of the order in which epochs take the samples; None: they take them as they come."""
    return None if isinstance(data, OwnSamples) and data.is_stream else seed


def _picture(
    data: Data, input_shape: tuple[int, ...], vocabulary: int | None
) -> tuple[int, int, int]:
    if vocabulary is not None or len(input_shape) != 3:
        read = f"{input_shape}" + (f", ids of {vocabulary} tokens" if vocabulary else "")
        raise DataError(f"{data!r} gives (channels, height, width), the model reads {read}")
    channels, height, width = input_shape
    return channels, height, width
