"""One rank's part of one layer: the module of the traced model, with this rank's pieces."""

import copy
import math
from collections import OrderedDict
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from workbench.layers.local.faster import LARGE_BYTES, Linear, Repeat, Transposed
from workbench.model.record.extended import NamedLinear, TransposedLinear
from workbench.model.weights.slices import Reader
from workbench.plan.graph.graph import Layer
from workbench.plan.io.errors import PlanError
from workbench.plan.placement.flow import Flow
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import Layout, Replicate, Shard


def local_module(
    module: nn.Module,
    layer: Layer,
    flow: Flow,
    rank: int,
    pieces: dict[str, Tensor],
    choice: LayerPlan | None = None,
) -> nn.Module:
    """Returns a copy of `module` with the local sizes and this rank's pieces of its weights.

    A convolution or linear layer cut by its input adds its bias on one rank of the group:
    the piece of the others is empty, and they add none. A scheme may compute something else
    instead (`Scheme.local`).

    Args:
        choice: how the layer is split; None: it follows its input, or is replicated.

    Raises:
        PlanError: an own scheme makes no module that holds the layer's weights.
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
    if isinstance(local, NamedLinear):
        local = local.usual()
    _set_sizes(local, layer, flow, rank)
    if choice is not None and choice.group_size > 1:
        local = _by_scheme(local, layer, flow, rank, choice)
    return _faster(local, layer)


def _by_scheme(
    local: nn.Module, layer: Layer, flow: Flow, rank: int, choice: LayerPlan
) -> nn.Module:
    """Returns what the layer's scheme computes on this rank, with all the layer's weights in it."""
    member, division = rank % choice.group_size, choice.division(layer)
    expected = _tensors(local)
    found = choice.meant.local(local, layer, division, member)
    place = f"layer {layer.name!r}, scheme {choice.name!r}: `local`"
    if not isinstance(found, nn.Module):
        raise PlanError(f"{place} must return an nn.Module, got {type(found).__name__}")
    if {name: id(tensor) for name, tensor in _tensors(found).items()} != {
        name: id(tensor) for name, tensor in expected.items()
    }:
        raise PlanError(
            f"{place} must return a module that holds the parameters and buffers of the one that "
            f"it was given, under their names ({', '.join(expected) or 'none'}); this one has "
            f"{', '.join(_tensors(found)) or 'none'}"
        )
    if choice.is_own:
        given = held(layer.output_shape, flow.outputs[layer.name], rank)
        found._forward_hooks = OrderedDict(found._forward_hooks)  # the traced model keeps its own
        found.register_forward_hook(partial(_check_output, place, member, given))
    return found


def _check_output(
    place: str, member: int, given: tuple[int, ...], _module: nn.Module, _read: Any, y: Tensor
) -> None:
    """Refuses an output that is not what the scheme's own layout says."""
    if tuple(y.shape[1:]) != given:
        raise PlanError(
            f"{place}, on rank {member} of its group, gives {tuple(y.shape[1:])} for a sample, and "
            f"its layout of the output says {given}"
        )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _faster(local: nn.Module, layer: Layer) -> nn.Module:
    """Returns a module that computes the same, in less time where there is one."""
    if type(local) is nn.Linear and local.weight.nbytes >= LARGE_BYTES:
        return Linear(local)
    if type(local) is TransposedLinear and local.weight.nbytes >= LARGE_BYTES:
        return Transposed(local)
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
    """Gives a module the sizes that its pieces have, where torch's modules keep them."""
    read = held(layer.input_shape, flow.inputs[layer.name], rank)
    given = held(layer.output_shape, flow.outputs[layer.name], rank)
    if isinstance(local, nn.Linear):
        local.out_features, local.in_features = local.weight.shape
        _add_once(local, local.out_features)
    elif isinstance(local, TransposedLinear):
        _add_once(local, local.weight.shape[1])
    elif isinstance(local, _ConvTransposeNd):
        local.in_channels = local.weight.shape[0]
        local.groups = local.groups * local.in_channels // max(layer.input_shape[0], 1)
        local.out_channels = local.groups * local.weight.shape[1]
        _add_once(local, local.out_channels)
    elif isinstance(local, _ConvNd):
        local.out_channels, local.in_channels = local.weight.shape[0], read[0]
        if local.groups > 1:
            local.groups = local.groups * local.out_channels // layer.output_shape[0]
        _add_once(local, local.out_channels)
    elif isinstance(local, nn.GroupNorm) and read[0]:
        local.num_groups = local.num_groups * read[0] // layer.input_shape[0]
        local.num_channels = read[0]
    elif isinstance(local, nn.LayerNorm):
        own = given[len(given) - len(local.normalized_shape) :]
        local.normalized_shape = tuple(own)
    elif isinstance(local, nn.Embedding):
        local.num_embeddings, local.embedding_dim = local.weight.shape


def _add_once(local: nn.Linear | TransposedLinear | _ConvNd, outputs: int) -> None:
    """Leaves a bias out where its piece is empty: another rank of the group adds it."""
    if local.bias is not None and local.bias.numel() != outputs:
        local.register_parameter("unused_bias", cast(nn.Parameter, local.bias))
        local.bias = None


def held(shape: tuple[int, ...], layout: Layout, rank: int) -> tuple[int, ...]:
    """Returns the shape of what this rank holds of one sample of an activation."""
    if not isinstance(layout.placement, Shard):
        return shape
    local = list(shape)
    local[layout.placement.dim - 1] = layout.placement.length(rank % layout.group_size)
    return tuple(local)


def idles(layer: Layer, flow: Flow, rank: int) -> bool:
    """Returns whether this rank has no element of a layer's input or of its output.

    A value without elements is no reason: every rank computes with it. Batch norm is not asked to
    idle: it knows what to do without channels.
    """
    if layer.rows == 0 or layer.kind == "batch_norm":
        return False
    shapes = (layer.input_shape, flow.inputs), (layer.output_shape, flow.outputs)
    return any(
        math.prod(held(shape, layouts[layer.name], rank)) == 0 < math.prod(shape)
        for shape, layouts in shapes
    )


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
