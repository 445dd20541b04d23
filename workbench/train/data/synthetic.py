"""Images drawn around one centre for each class: real enough to be learnt, of any size."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.plan.experiment import Synthetic

_CENTRES_SEED = 1 << 40  # beyond every sample's own seed, which is its number


class Centres:
    """One split: sample i is the centre of class i % classes, plus noise of the same strength.

    Centres are coarse patterns (4x4, resized), which survive pooling. Nothing else is
    resident: noise is drawn, seeded by the sample's number, when the sample is asked for.

    Args:
        data: how many samples and classes.
        shape: what the model reads, images or not.
        split: "train" or "test"; the test split has a quarter as many samples, all new.
    """

    def __init__(
        self, data: Synthetic, shape: tuple[int, ...], split: Literal["train", "test"]
    ) -> None:
        self.num_classes = data.classes
        self._shape = shape
        self._first = 0 if split == "train" else data.samples
        self._length = data.samples if split == "train" else max(1, data.samples // 4)
        coarse = (shape[0], 4, 4) if len(shape) == 3 else shape
        generator = torch.Generator().manual_seed(_CENTRES_SEED)
        self._centres = torch.randn(data.classes, *coarse, generator=generator)

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of these rows."""
        images, generator = torch.empty(len(indices), *self._shape), torch.Generator()
        for image, index in zip(images, indices.tolist(), strict=True):
            image.normal_(generator=generator.manual_seed(self._first + index))
        labels = indices % self.num_classes
        centres = self._centres[labels]
        if len(self._shape) == 3:
            centres = F.interpolate(centres, self._shape[1:], mode="bilinear", antialias=True)
        return images.add_(centres.view_as(images)), labels
