"""Fitting pictures to what a model reads: size, channels and range."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Rec. 601 luma, as PIL and torchvision turn colour into grey.
_LUMA = (0.299, 0.587, 0.114)


class DataError(ValueError):
    """Data that is not there or does not fit the model; the text says what to do."""


def fit(
    pixels: Tensor, shape: tuple[int, int, int], *, highest: float, mean: float, std: float
) -> Tensor:
    """Float32 images of this shape: bilinearly resized, then normalized.

    Args:
        pixels: [n, channels, height, width] of integers 0 ... `highest`; grey or RGB.
        shape: channels, height and width that the model reads. Grey is repeated to any number
            of channels; RGB is averaged to grey for a model that reads one.
        highest: the integer that means white.
        mean: of the data, on the scale 0 ... 1.
        std: likewise.

    Raises:
        DataError: RGB for a model that reads neither one nor three channels.
    """
    channels, height, width = shape
    if pixels.shape[1] == 3 and channels not in (1, 3):
        raise DataError(f"the model reads {channels} channels; colour images give 1 or 3")
    images = pixels.to(torch.float32)
    if pixels.shape[1] == 3 and channels == 1:
        images = (images * torch.tensor(_LUMA).view(3, 1, 1)).sum(dim=1, keepdim=True)
    images = images.sub_(highest * mean).div_(highest * std)
    if images.shape[2:] != (height, width):
        images = F.interpolate(images, (height, width), mode="bilinear", antialias=True)
    return images.expand(len(images), channels, height, width).contiguous()
