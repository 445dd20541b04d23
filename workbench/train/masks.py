"""Gives a whole model the random masks of a split one: no two random streams can be compared."""

from itertools import cycle
from typing import Any

from torch import Tensor, nn

from workbench.layers.attention import local_attention
from workbench.layers.context import BatchContext
from workbench.layers.dropout import PlacedDropout
from workbench.layers.self_attention import LocalSelfAttention
from workbench.plan.graph import Graph, Layer
from workbench.plan.layout import ROWS


class VerifyError(ValueError):
    """A plan that cannot be held against one process; the text says why."""


def place_dropout(model: nn.Module, graph: Graph, context: BatchContext) -> None:
    """Replaces what drops elements at random by what drops them by their indices.

    Attention that drops nothing stays torch's own.

    Args:
        model: the module that the graph was traced from, with its values.
        graph: the traced model.
        context: of the one process.

    Raises:
        VerifyError: a function drops elements, which cannot be replaced.
    """
    modules = dict(model.named_modules())
    turns: dict[str, list[PlacedDropout]] = {}
    for layer in graph.layers:
        if layer.kind in ("dropout", "stochastic_depth"):
            path = layer.name.partition("@")[0]  # of a further call of the same module
            if path not in modules:
                raise VerifyError(
                    f"layer {layer.name!r} drops elements through a function, which one process "
                    f"cannot repeat; use nn.Dropout (or StochasticDepth) in the model"
                )
            turns.setdefault(path, []).append(_placed(modules[path], layer, context))
        elif layer.kind == "attention" and not layer.shared:
            attention = modules[layer.name]
            if _drops(attention):
                model.set_submodule(layer.name, _attention(attention, layer, context))
    for path, placed in turns.items():
        model.set_submodule(path, _InTurn(placed))


class _InTurn(nn.Module):
    """A module that is called several times in a forward pass, with other masks each time."""

    def __init__(self, placed: list[PlacedDropout]) -> None:
        super().__init__()
        self.turns = cycle(placed)

    def forward(self, x: Tensor) -> Tensor:
        return next(self.turns).train(self.training)(x)


def _placed(module: Any, layer: Layer, context: BatchContext) -> PlacedDropout:
    mode = str(getattr(module, "mode", "element"))
    p, shape = float(module.p), layer.input_shape
    return PlacedDropout(p, ROWS, shape, layer.rows, layer.name, context, mode)


def _drops(attention: nn.Module) -> bool:
    return any(getattr(attention, name, 0.0) > 0 for name in ("dropout", "attention_dropout"))


def _attention(module: nn.Module, layer: Layer, context: BatchContext) -> nn.Module:
    if type(module) is nn.MultiheadAttention:
        return _AsMultihead(module, layer, ROWS, context)
    return local_attention(module, layer, ROWS, context, None)


class _AsMultihead(LocalSelfAttention):
    """Called as `nn.MultiheadAttention` is; nobody reads the weights (`model/attention.py`)."""

    def forward(self, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(query), None
