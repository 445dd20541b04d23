"""Layers that draw random numbers, so that no split changes them (`model/tracing/draws.py`).

An element's fate in dropout is a hash of (seed, step, layer, index of its sample in the global
batch, index in its sample), so that every plan, one process included, drops the same elements.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from workbench.layers.local.context import BatchContext
from workbench.model.record.draws import (
    INDEPENDENT,
    Draws,
    Held,
    drawing,
    hashed,
    kept,
    placed_bits,
)
from workbench.plan.graph.graph import Layer
from workbench.plan.placement.placement import Layout, Shard


class DrawError(RuntimeError):
    """A layer draws otherwise than it was traced; the text names the layer and the rank."""


class PlacedDraws(Draws):
    """Makes what layers draw, one after the other, from the places of its elements.

    Args:
        layers: the layers whose random tensors are drawn, in their order.
        held: the part that this rank draws of each random tensor; None: all of its rows.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        group_size: int,
        context: BatchContext,
        held: Held | None = None,
    ) -> None:
        super().__init__()
        self.layers, self.group_size, self.context = layers, group_size, context
        self.held = held
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
        return placed_bits(key, shape, dim, samples, self.held)


class Drawn(nn.Module):
    """Calls a layer's operation, and makes what it draws.

    Args:
        call: the operation. A module stays where it stands, and is no part of this one.
        held: the part that this rank draws of each random tensor; None: all of its rows.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        layer: Layer,
        group_size: int,
        context: BatchContext,
        held: Held | None = None,
    ) -> None:
        super().__init__()
        self.call, self.layer, self.held = call, layer, held
        self.group_size, self.context = group_size, context

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with drawing(PlacedDraws([self.layer], self.group_size, self.context, self.held)):
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


class PlacedDropout(nn.Module):
    """Dropout of a tensor that may be cut.

    Args:
        p: the probability that an element is zeroed; the others are scaled by 1 / (1 - p).
        mode: what lives or dies as one: an "element", a "row" of dimension 0 (stochastic
            depth), or the "batch".
    """

    def __init__(
        self,
        p: float,
        layout: Layout,
        shape: tuple[int, ...],
        rows: int,
        name: str,
        context: BatchContext,
        mode: str = "element",
        *,
        index: int = 0,
        always: bool = False,
    ) -> None:
        super().__init__()
        self.p, self.layout, self.shape, self.rows = p, layout, shape, rows
        self.name, self.context, self.mode = name, context, mode
        self.index, self.always = index, always

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training or self.always) or self.p == 0.0:
            return x
        if self.p == 1.0:
            return x * 0.0
        keep = kept(self._bits(x.device), 1.0 - self.p)
        return x * (keep.to(x.dtype) / (1.0 - self.p))

    def _bits(self, device: torch.device) -> Tensor:
        """Returns 64 bits for each thing that lives or dies as one.

        Small indices are only made large when they are hashed.
        """
        ones = (1,) * len(self.shape)
        if self.mode == "batch":
            samples = element = torch.zeros((1, 1, *ones), dtype=torch.int64, device=device)
        else:
            samples = self.context.indices(self.layout.group_size, device=device)
            samples = samples.view(-1, 1, *ones)
            element = torch.arange(self.rows, device=device).view(1, -1, *ones)
        if self.mode == "element":
            element = element * math.prod(self.shape) + self._features(device)
        key = self.context.key(self.name, self.index)
        return hashed(key, samples, element).flatten(0, 1)

    def _features(self, device: torch.device) -> Tensor:
        """Returns the index in the whole row of every element of the local one [1, 1, *shape]."""
        cut = self.layout.placement
        index = torch.zeros((1,) * len(self.shape), dtype=torch.int64, device=device)
        for d, length in enumerate(self.shape):
            start, size = 0, length
            if isinstance(cut, Shard) and cut.dim == d + 1:
                start, size = cut.span(self.context.rank % self.layout.group_size)
            along = torch.arange(start, start + size, device=device)
            stride = math.prod(self.shape[d + 1 :])
            index = index + (along * stride).view(
                *[-1 if i == d else 1 for i in range(len(self.shape))]
            )
        return index

    def extra_repr(self) -> str:
        """Returns what `print(model)` says of it."""
        return f"p={self.p}, {self.mode}"
