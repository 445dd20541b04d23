"""Initial weights in which nothing is alike, so that a comparison can see every mistake.

Biases start at zero, norms at one, and some models' last layers at zero: then a bias that is
added twice, a norm cut in the wrong place or a gradient that never arrives changes nothing.
"""

import zlib
from pathlib import Path

import torch
from torch import Tensor

from workbench.model.files import write_tensors
from workbench.model.slices import WeightsFile
from workbench.plan.graph import Graph

# Of the noise's standard deviation to the constant, and the constant that zero counts as.
NOISE, LEAST = 0.1, 0.1


def vary(graph: Graph, weights: Path, path: Path) -> None:
    """Writes the weights again, with noise on each trainable tensor that is one constant.

    Args:
        graph: the model.
        weights: its initial weights.
        path: where to write.
    """
    reader = WeightsFile(weights)
    values = {}
    for weight in (weight for layer in graph.layers for weight in layer.weights):
        tensor = reader.read(weight.name)
        values[weight.name] = _varied(weight.name, tensor) if weight.trainable else tensor
    write_tensors(path, values)


def _varied(name: str, tensor: Tensor) -> Tensor:
    if tensor.numel() == 0 or not (tensor == tensor.flatten()[0]).all():
        return tensor
    level = max(float(tensor.flatten()[0].abs()), LEAST)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return tensor + NOISE * level * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
