"""CIFAR-10: 60,000 colour images of 32x32, through torchvision."""

from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from workbench.model.vision import torchvision
from workbench.plan.experiment import CIFAR10
from workbench.train.data.pixels import DataError, fit


class Pictures:
    """One split, resident as bytes in a numpy array (154 MB for training, 31 MB for test).

    Args:
        data: where the files are, and whether they may be fetched. Of several ranks on one
            host the first fetches and the others wait.
        shape: channels, height and width that the model reads.
        split: "train" or "test".

    Raises:
        DataError: the files are missing or damaged, or cannot be fetched.
    """

    num_classes = 10

    def __init__(
        self, data: CIFAR10, shape: tuple[int, int, int], split: Literal["train", "test"]
    ) -> None:
        root = Path(data.root).expanduser()
        try:
            if data.download:
                root.mkdir(parents=True, exist_ok=True)
            with FileLock(root / "cifar10.lock") if data.download else nullcontext():
                # Pickles; torchvision holds each file against its known MD5 first.
                pictures = torchvision().datasets.CIFAR10(
                    root, train=split == "train", download=data.download
                )
        except (RuntimeError, OSError) as error:
            raise DataError(_remedy(root, data.download, error)) from error
        self._shape = shape
        self._pixels = pictures.data
        self._labels = np.asarray(pictures.targets, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of these rows."""
        rows = indices.numpy()
        pixels = torch.from_numpy(self._pixels[rows]).permute(0, 3, 1, 2)
        images = fit(pixels, self._shape, highest=255, mean=0.473, std=0.251)
        return images, torch.from_numpy(self._labels[rows])


def _remedy(root: Path, download: bool, error: Exception) -> str:
    by_hand = f"unpack https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz in {root.resolve()}"
    if download:
        return f"CIFAR-10 could not be fetched ({error}); {by_hand}"
    return (
        f"no intact CIFAR-10 in {root.resolve()}; use "
        f"CIFAR10(root={str(root)!r}, download=True), or {by_hand}"
    )
