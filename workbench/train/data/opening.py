"""Opens the data set that an experiment names."""

from collections.abc import Sequence
from typing import Literal, Protocol

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
from workbench.plan.graph.graph import Graph, Input, shown
from workbench.train.data.built_in import Bytes, Centres, EightByEight, Files, Pictures, Sequences
from workbench.train.data.collated import Batch
from workbench.train.data.own_samples import OwnSamples
from workbench.train.data.reading import DataError
from workbench.train.data.several import Masks, Together

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

    def batch(self, indices: Tensor, epoch: int = ...) -> Batch:
        """(inputs, targets); n may be 0.

        Inputs are one tensor [n, *shape], or a tuple of one for each that the model reads. Those
        of the built-in ones are float32 and normalized, and targets int64 labels [n]; other targets
        are any nesting of tensors [n, ...].
        """
        ...


def open_data(
    data: Data,
    inputs: Sequence[Input],
    num_classes: int,
    split: Split,
    seed: int = 0,
    *,
    per_token: bool = False,
) -> Dataset:
    """The data set that a value names, fitted to a model.

    Args:
        data: the value, as an `Experiment` holds it.
        inputs: what the model reads.
        num_classes: the model's number of classes.
        split: "train" or "test".
        seed: the experiment's, for what the user's own data draws at random.
        per_token: whether it scores classes for each token, so that labels are the next tokens.

    Raises:
        DataError: the files are not there, or the data does not fit the model.
        OwnObjectError: the user's own data cannot be loaded here.
    """
    opened: Dataset
    match data:
        case Synthetic() if len(inputs) > 1:
            opened = Together(data, inputs, num_classes, split, per_token=per_token)
        case Synthetic():
            (one,) = inputs
            if one.vocabulary is not None:
                opened = Sequences(data, one.shape, split, one.vocabulary, per_token=per_token)
            else:
                kind = Masks if one.dtype == "bool" else Centres
                opened = kind(data, one.shape, split)
        case Text():
            one = _only(data, inputs)
            told = one.shape, num_classes, split, one.vocabulary
            opened = Bytes(data, *told, per_token=per_token)
        case Digits():
            opened = EightByEight(_picture(data, inputs), split)
        case CIFAR10():
            opened = Pictures(data, _picture(data, inputs), split)
        case ImageFolder():
            opened = Files(data, _picture(data, inputs), split)
        case TorchData():
            return OwnSamples(data, split, inputs, seed)
    if opened.num_classes not in (None, num_classes):
        raise DataError(
            f"{data!r} has {opened.num_classes} classes, the model {num_classes}; "
            f"trace it with num_classes={opened.num_classes}"
        )
    return opened


def open_for(graph: Graph, data: Data, split: Split, seed: int = 0) -> Dataset:
    """The data set that a value names, fitted to a model; see `open_data`."""
    per_token = graph.scores_tokens
    return open_data(data, graph.inputs, graph.num_classes, split, seed, per_token=per_token)


def order_seed(data: Dataset, seed: int) -> int | None:
    """The seed of the order in which epochs take the samples; None: they take them as they come."""
    return None if isinstance(data, OwnSamples) and data.is_stream else seed


def _only(data: Data, inputs: Sequence[Input]) -> Input:
    if len(inputs) > 1:
        raise DataError(f"{data!r} gives one tensor, the model reads several: {shown(inputs)}")
    return inputs[0]


def _picture(data: Data, inputs: Sequence[Input]) -> tuple[int, int, int]:
    one = _only(data, inputs)
    if not one.is_real or len(one.shape) != 3:
        ids = f", ids of {one.vocabulary} tokens" if one.vocabulary else ", a mask"
        read = f"{one.shape}" + ids * (not one.is_real)
        raise DataError(f"{data!r} gives (channels, height, width), the model reads {read}")
    channels, height, width = one.shape
    return channels, height, width
