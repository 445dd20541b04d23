"""Layers that draw random numbers, so that no split changes them (`model/tracing/draws.py`)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from workbench.layers.context import BatchContext
from workbench.model.tracing.draws import INDEPENDENT, Draws, drawing, placed_bits
from workbench.plan.graph import Layer


class DrawError(RuntimeError):
    """A layer draws otherwise than it was traced; the text names the layer and the rank."""


class PlacedDraws(Draws):
    """Makes what layers draw, one after the other, from the places of its elements.

    Args:
        layers: the layers whose random tensors are drawn, in their order.
        group_size: the size of the group whose rows are in the batch.
        context: the rows that are held now.
    """

    def __init__(self, layers: Sequence[Layer], group_size: int, context: BatchContext) -> None:
        super().__init__()
        self.layers, self.group_size, self.context = layers, group_size, context
        every = [(layer, index) for layer in layers for index in range(len(layer.draws))]
        self._coming = iter(every)

    def left(self) -> str:
        """Returns the name of the layer that is to draw next; "": nothing is left to be drawn."""
        return next((repr(layer.name) for layer, _ in self._coming), "")

    def bits(self, shape: torch.Size, device: torch.device) -> Tensor:
        layer, index = next(self._coming, (None, 0))
        if layer is None:
            names = ", ".join(repr(layer.name) for layer in self.layers) or "the model"
            raise DrawError(
                f"rank {self.context.rank}: {names} draws more random tensors than when it was "
                f"traced; the next one has shape {tuple(shape)}"
            )
        key = self.context.key(layer.name, index)
        dim = layer.draws[index]
        samples = self.context.indices(self.group_size, device=device)
        if dim != INDEPENDENT and (dim >= len(shape) or shape[dim] % max(len(samples), 1)):
            raise DrawError(
                f"rank {self.context.rank}: layer {layer.name!r} draws a random tensor of shape "
                f"{tuple(shape)}, where dimension {dim} was traced to have as many rows for each "
                f"of the {len(samples)} samples"
            )
        return placed_bits(key, shape, dim, samples)


class Drawn(nn.Module):
    """Calls a layer's operation, and makes what it draws.

    Args:
        call: the operation. A module stays where it stands, and is no part of this one.
        layer: the layer of the graph.
        group_size: the size of the group whose rows it computes.
        context: the rows that are held now.
    """

    def __init__(
        self, call: Callable[..., Any], layer: Layer, group_size: int, context: BatchContext
    ) -> None:
        super().__init__()
        self.call, self.layer = call, layer
        self.group_size, self.context = group_size, context

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with drawing(PlacedDraws([self.layer], self.group_size, self.context)):
            return self.call(*args, **kwargs)

    def extra_repr(self) -> str:
        """Returns what `print(model)` says of it."""
        return f"{self.layer.target}, draws {self.layer.draws}"


def called(traced: torch.fx.GraphModule, node: torch.fx.Node) -> Callable[..., Any]:
    """Returns what a node calls, as a function of its arguments; no module itself."""
    if node.op == "call_module":
        return traced.get_submodule(str(node.target)).__call__
    if node.op == "call_method":
        return partial(_call_method, str(node.target))
    assert callable(node.target)
    return node.target


def _call_method(name: str, x: Any, /, *args: Any, **kwargs: Any) -> Any:
    return getattr(x, name)(*args, **kwargs)
