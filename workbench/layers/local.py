"""One rank's part of one layer: the module of the traced model, with this rank's pieces."""

import copy
import math
from typing import cast

import torch
from torch import Tensor, nn

from workbench.layers.faster import LARGE_BYTES, Linear, Repeat
from workbench.model.weights.slices import Reader
from workbench.plan.graph import Layer
from workbench.plan.placement.flow import Flow
from workbench.plan.placement.layout import Layout
from workbench.plan.placement.placement import Replicate, Shard


def local_module(
    module: nn.Module, layer: Layer, flow: Flow, rank: int, pieces: dict[str, Tensor]
) -> nn.Module:
    """Returns a copy of `module` with the local sizes and this rank's pieces of its weights.

    A convolution or linear layer cut by its input adds its bias on one rank of the group:
    the piece of the others is empty, and they add none.

    Args:
        module: the module of the traced model, without values.
        layer: the layer of the graph.
        flow: the placements of activations and weights.
        rank: the global rank.
        pieces: this rank's pieces of the layer's weights, by name in the state_dict.
    """
    local = copy.copy(module)
    prefixes = {weight.name: weight.name.removeprefix(f"{layer.name}.") for weight in layer.weights}
    for part in {path.rpartition(".")[0] for path in prefixes.values()}:
        _give_own_tables(local, part)
    for weight in layer.weights:
        path, _, leaf = prefixes[weight.name].rpartition(".")
        owner = local.get_submodule(path)
        piece = pieces[weight.name]
        if weight.trainable or weight.frozen:
            owner._parameters[leaf] = nn.Parameter(piece, requires_grad=weight.trainable)
        else:
            owner._buffers[leaf] = piece
    _set_sizes(local, layer, flow, rank)
    return _faster(local, layer)


def _faster(local: nn.Module, layer: Layer) -> nn.Module:
    """Returns a module that computes the same, in less time where there is one."""
    if type(local) is nn.Linear and local.weight.nbytes >= LARGE_BYTES:
        return Linear(local)
    if type(local) is nn.AdaptiveAvgPool2d and layer.input_shape[-2:] == (1, 1):
        height, width = layer.output_shape[-2:]
        return Repeat(height, width)
    return local


def _give_own_tables(root: nn.Module, path: str) -> None:
    """Copies the modules on the way to `path`, so that the traced model keeps its own."""
    names = path.split(".") if path else []
    owner = root
    _own(owner)
    for name in names:
        owner._modules[name] = owner = copy.copy(owner.get_submodule(name))
        _own(owner)


def _own(module: nn.Module) -> None:
    for table in ("_parameters", "_buffers", "_modules"):
        module.__dict__[table] = dict(module.__dict__[table])


def _set_sizes(local: nn.Module, layer: Layer, flow: Flow, rank: int) -> None:
    if isinstance(local, nn.Linear):
        local.out_features, local.in_features = local.weight.shape
    elif isinstance(local, nn.Conv2d):
        local.out_channels = local.weight.shape[0]
        local.in_channels = held(layer.input_shape, flow.inputs[layer.name], rank)[0]
        if layer.groups > 1:
            local.groups = layer.groups * local.out_channels // layer.output_shape[0]
    if isinstance(local, nn.Linear | nn.Conv2d) and local.bias is not None:
        if local.bias.numel() != local.weight.shape[0]:
            local.register_parameter("unused_bias", cast(nn.Parameter, local.bias))
            local.bias = None


def held(shape: tuple[int, ...], layout: Layout, rank: int) -> tuple[int, ...]:
    """Returns the shape of what this rank holds of one sample of an activation.

    Args:
        shape: the shape of one whole sample.
        layout: how the activation lies.
        rank: the global rank.
    """
    if not isinstance(layout.placement, Shard):
        return shape
    local = list(shape)
    local[layout.placement.dim - 1] = layout.placement.sizes[rank % layout.group_size]
    return tuple(local)


def idles(layer: Layer, flow: Flow, rank: int) -> bool:
    """Returns whether this rank has no element of a layer's input or of its output.

    Batch norm is not asked to idle: it knows what to do without channels.
    """
    read = math.prod(held(layer.input_shape, flow.inputs[layer.name], rank))
    written = math.prod(held(layer.output_shape, flow.outputs[layer.name], rank))
    return layer.rows > 0 and layer.kind != "batch_norm" and read * written == 0


def read_pieces(
    layer: Layer,
    flow: Flow,
    rank: int,
    reader: Reader,
    device: torch.device,
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """Reads this rank's pieces of a layer's weights, by name in the state_dict; nothing else.

    Args:
        layer: the layer whose weights are read.
        flow: the placements of activations and weights.
        rank: the global rank.
        reader: the initial weights, or a checkpoint.
        device: the device of the pieces.
        dtype: the type of floating-point weights; None: that in which they were saved.
    """
    pieces = {}
    for weight in layer.weights:
        placed = flow.weights[weight.name]
        cut = None if isinstance(placed.placement, Replicate) else placed.placement
        piece = reader.read(weight.name, cut, rank % placed.group_size)
        floating = piece.is_floating_point()
        pieces[weight.name] = piece.to(device, dtype if floating else None)
    return pieces
