"""The original module, whole, in one process."""

from pathlib import Path

import torch
from torch import nn

from workbench.model.build import build_fake
from workbench.model.slices import WeightsFile
from workbench.plan.graph import Graph


def whole_model(graph: Graph, weights: Path, dtype: torch.dtype) -> nn.Module:
    """The module that the graph was traced from, with every tensor under all its names.

    It is in training mode, but for the parts that are in eval mode while it trains.

    Args:
        graph: the traced model.
        weights: the file of its values.
        dtype: of floating-point weights.
    """
    model = build_fake(graph.source)
    reader = WeightsFile(weights)
    for weight in (weight for layer in graph.layers for weight in layer.weights):
        tensor = reader.read(weight.name)
        tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
        is_parameter = weight.trainable or weight.frozen
        value = nn.Parameter(tensor, requires_grad=weight.trainable) if is_parameter else tensor
        for name in (weight.name, *weight.aliases):
            path, _, leaf = name.rpartition(".")
            owner = model.get_submodule(path)
            table = owner._parameters if is_parameter else owner._buffers
            table[leaf] = value  # type: ignore[assignment]
    return model
