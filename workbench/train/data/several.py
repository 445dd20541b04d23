"""Synthetic samples of masks, and of models that read several inputs."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from workbench.plan.experiment.experiment import Synthetic
from workbench.plan.graph.graph import Input
from workbench.train.data.built_in import Centres, Drawn, Sequences
from workbench.train.data.reading import DataError


class Masks(Drawn):
    """One split: each line of a sample's last dimension is true up to a random length, at least 1.

    Args:
        data: how many samples and classes.
        shape: the shape of one sample; of () a sample is either truth.
        split: "train" or "test"; the test split has a quarter as many samples, all new.
        part: the number of the input among the model's.
    """

    def __init__(
        self,
        data: Synthetic,
        shape: tuple[int, ...],
        split: Literal["train", "test"],
        part: int = 0,
    ) -> None:
        super().__init__(data, split, part)
        self.num_classes, self._shape = data.classes, shape

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        """Masks and labels of these rows, the same in every epoch."""
        *lines, length = self._shape or (1,)
        least, places = int(bool(self._shape)), torch.arange(length)
        masks = torch.empty(len(indices), *lines, length, dtype=torch.bool)
        for mask, generator in zip(masks, self._generators(indices), strict=True):
            until = torch.randint(least, length + 1, (*lines, 1), generator=generator)
            torch.lt(places, until, out=mask)
        return masks.view(len(indices), *self._shape), indices % self.num_classes


class Together:
    """One split of a model that reads several inputs: of each its own samples, with one label.

    Args:
        data: how many samples and classes.
        inputs: what the model reads.
        num_classes: the model's number of classes.
        split: "train" or "test".
        per_token: whether labels are the next tokens: of the input with as many tokens as classes.

    Raises:
        DataError: no input has as many.
    """

    def __init__(
        self,
        data: Synthetic,
        inputs: Sequence[Input],
        num_classes: int,
        split: Literal["train", "test"],
        *,
        per_token: bool = False,
    ) -> None:
        counts = [one.vocabulary for one in inputs]
        if per_token and num_classes not in counts:
            raise DataError(
                f"{data!r} has the next tokens as labels, and the model scores {num_classes} "
                f"classes for each, as many as no input has tokens: give data of your own"
            )
        self._labels = counts.index(num_classes) if per_token else 0
        self.num_classes = None if per_token else data.classes
        self._parts: list[Centres | Sequences | Masks] = []
        for part, one in enumerate(inputs):
            if one.vocabulary is not None:
                told = per_token and part == self._labels
                made = Sequences(data, one.shape, split, one.vocabulary, part, per_token=told)
                self._parts.append(made)
            else:
                kind = Masks if one.dtype == "bool" else Centres
                self._parts.append(kind(data, one.shape, split, part))

    def __len__(self) -> int:
        return len(self._parts[0])

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[tuple[Tensor, ...], Tensor]:
        """Of each input, and labels, of these rows, the same in every epoch."""
        inputs, labels = zip(*(part.batch(indices) for part in self._parts), strict=True)
        return inputs, labels[self._labels]
