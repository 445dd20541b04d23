"""scikit-learn's 1,797 real images of handwritten digits, 8x8 grey."""

import importlib.util
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from workbench.train.data.pixels import DataError, fit


class EightByEight:
    """One split, resident as the 8x8 bytes that it is (115 KB for both splits together).

    Every fifth image of each class, in the file's order, is the test split's (355); the
    others are the training split's (1,442).

    Args:
        shape: channels, height and width that the model reads.
        split: "train" or "test".
    """

    num_classes = 10

    def __init__(self, shape: tuple[int, int, int], split: Literal["train", "test"]) -> None:
        # The file itself, because importing `sklearn.datasets` takes a second and 100 MB.
        package = importlib.util.find_spec("sklearn")
        if package is None or package.origin is None:
            raise DataError("Digits() come with scikit-learn: pip install scikit-learn")
        path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
        labels = table[:, -1]
        # How many images of the same class came before each image.
        earlier = np.array([np.sum(labels[:i] == label) for i, label in enumerate(labels)])
        rows = (earlier % 5 == 4) == (split == "test")
        self._shape = shape
        self._pixels = torch.from_numpy(table[rows, :-1].reshape(-1, 1, 8, 8))
        self._labels = torch.from_numpy(labels[rows].astype(np.int64))

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of these rows."""
        pixels = self._pixels[indices]
        images = fit(pixels, self._shape, highest=16, mean=0.305, std=0.376)
        return images, self._labels[indices]
