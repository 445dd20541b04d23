"""Gives a whole model the draws of a split one: no two random streams can be compared."""

from collections.abc import Iterator
from itertools import cycle, repeat
from typing import Any

from torch import nn

from workbench.layers.context import BatchContext
from workbench.layers.draws import PlacedDraws
from workbench.model.draws import drawing
from workbench.plan.graph import Graph, Layer


class VerifyError(ValueError):
    """A plan that cannot be held against one process; the text says why."""


def place_draws(model: nn.Module, graph: Graph, context: BatchContext) -> None:
    """Lets the model's own operations draw what the layers of a split model draw.

    A module draws as its layers do, call by call. All else that draws are functions, whose draws
    come in the order in which they were traced.

    Args:
        model: the module that the graph was traced from, with its values.
        graph: the traced model, in the mode in which `model` is run.
        context: of the one process.
    """
    modules = dict(model.named_modules())
    calls: dict[str, list[Layer]] = {}
    functions: list[Layer] = []
    for layer in graph.layers:
        path = layer.name.partition("@")[0]  # of a further call of the same module
        if path in modules and _calls(layer, modules[path]):
            calls.setdefault(path, []).append(layer)
        elif layer.random:
            functions.append(layer)
    for path, layers in calls.items():
        if any(layer.random for layer in layers):
            _place(modules[path], cycle([layer] for layer in layers), context)
    _place(model, repeat(functions), context, every=True)


def _calls(layer: Layer, module: nn.Module) -> bool:
    """Whether a layer calls a module, rather than a function whose node has the same name."""
    name = layer.target.rpartition(".")[2]
    return layer.kind == "attention" or name == type(module).__name__


def _place(
    module: nn.Module, turns: Iterator[list[Layer]], context: BatchContext, *, every: bool = False
) -> None:
    """Lets each forward pass draw what the layers whose turn it is draw; or `every` one of it."""
    forward = module.forward

    def placed(*args: Any, **kwargs: Any) -> Any:
        draws = PlacedDraws(next(turns), 1, context)
        with drawing(draws):
            found = forward(*args, **kwargs)
        if every and (left := draws.left()):
            raise VerifyError(
                f"{left} was traced to draw random numbers, and the model itself drew fewer: it "
                "decides otherwise than it did when it was traced"
            )
        return found

    module.forward = placed
