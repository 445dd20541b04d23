"""A folder of images, one subfolder for each class, through torchvision."""

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from workbench.model.vision import torchvision
from workbench.plan.experiment import ImageFolder
from workbench.train.data.pixels import DataError, fit


class Files:
    """One split: `root/<split>/<class>/**`, in the order of names, decoded when asked for.

    Args:
        data: where the folder is.
        shape: channels, height and width that the model reads; images are resized to it
            whole, and read as colour unless the model has one channel.
        split: "train" or "test".

    Raises:
        DataError: a folder is missing or empty, the splits have different classes, or (in
            `batch`) a file is no image.
    """

    def __init__(
        self, data: ImageFolder, shape: tuple[int, int, int], split: Literal["train", "test"]
    ) -> None:
        root = Path(data.root).expanduser()
        classes = {name: _classes(root, name) for name in ("train", "test")}
        if classes["train"] != classes["test"]:
            only = sorted(set(classes["train"]) ^ set(classes["test"]))
            raise DataError(
                f"train/ and test/ in {root.resolve()} must have the same classes; "
                f"in one of them only: {', '.join(only)}"
            )
        try:
            self._files = torchvision().datasets.ImageFolder(root / split).samples
        except FileNotFoundError as error:
            raise DataError(f"{root.resolve() / split}: {error}") from error
        self.num_classes = len(classes["train"])
        self._shape = shape

    def __len__(self) -> int:
        return len(self._files)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of these rows."""
        chosen = [self._files[row] for row in indices.tolist()]
        channels, height, width = self._shape
        grey = channels == 1
        pixels = torch.zeros(len(chosen), 1 if grey else 3, height, width, dtype=torch.uint8)
        for row, (path, _) in zip(pixels, chosen, strict=True):
            row.copy_(_decoded(path, "L" if grey else "RGB", (width, height)))
        images = fit(pixels, self._shape, highest=255, mean=0.449, std=0.226)
        return images, torch.tensor([label for _, label in chosen], dtype=torch.int64)


def _classes(root: Path, split: str) -> list[str]:
    folder = root / split
    found = (
        sorted(item.name for item in folder.iterdir() if item.is_dir()) if folder.is_dir() else []
    )
    if not found:
        raise DataError(
            f"no class folders in {folder.resolve()}; ImageFolder needs train/<class>/* and "
            f"test/<class>/* in its root"
        )
    return found


def _decoded(path: str, mode: str, size: tuple[int, int]) -> Tensor:
    try:
        with Image.open(path) as image:
            image.draft(mode, size)  # a JPEG much larger than `size` is decoded at a fraction
            resized = image.convert(mode).resize(size, Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError) as error:  # PIL's, by format
        raise DataError(f"{path} cannot be read as an image: {error}") from error
    pixels = torch.from_numpy(np.array(resized))
    return pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1)
