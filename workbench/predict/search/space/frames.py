"""What of each stage is the same for all its states."""

from collections.abc import Mapping
from dataclasses import dataclass

from workbench.plan.choice import LayerPlan
from workbench.plan.graph import Graph, Layer
from workbench.plan.rules import CARRIES_PARTIAL, SPLITTABLE
from workbench.predict.search.space.following import Following


@dataclass(frozen=True)
class Frame:
    """What of a stage is the same for all its states: places in the state, by index.

    Attributes:
        layer: of the stage.
        names: of the live values before it.
        reads: indices of its inputs among them.
        ends: indices of those that it reads last.
        heard: number of layers with a scheme that have been heard so far.
        wisher: index among them of whom the layer hears, or of itself; None: there is none.
        lives: whether its own value is read later on.
        may_carry: whether its gradient can come back as summands.
    """

    layer: Layer
    names: tuple[str, ...]
    reads: tuple[int, ...]
    ends: tuple[int, ...]
    heard: int
    wisher: int | None
    lives: bool
    may_carry: bool


def frames_of(
    graph: Graph, following: Following, options: Mapping[str, tuple[LayerPlan, ...]]
) -> list[Frame]:
    """The frames of all layers, in order."""
    last = {name: (readers or (name,))[-1] for name, readers in graph.consumers.items()}
    names, heard = ["input"], list[str]()
    found = []
    for layer in graph.layers:
        whom = following.wishers.get(layer.name)
        if whom is not None and whom not in heard:
            heard.append(whom)
        own = layer.name if layer.kind in SPLITTABLE else whom
        readers = graph.consumers[layer.name]
        found.append(
            Frame(
                layer=layer,
                names=tuple(names),
                reads=tuple(names.index(name) for name in layer.inputs),
                ends=tuple(i for i, n in enumerate(names) if last[n] == layer.name),
                heard=len(heard),
                wisher=heard.index(own) if own in heard else None,
                lives=bool(readers),
                may_carry=may_carry(graph, layer.name)
                and bool(readers)
                and all(_may_sum(graph[name], options) for name in readers),
            )
        )
        names = [name for name in names if last[name] != layer.name]
        names += [layer.name] * bool(readers)
        if layer.name in heard:
            heard.remove(layer.name)
    return found


def may_carry(graph: Graph, name: str) -> bool:
    """Whether the gradient of a value can come back as summands."""
    if name == "input" or name in graph.outputs:
        return False
    return graph[name].kind in CARRIES_PARTIAL


def _may_sum(reader: Layer, options: Mapping[str, tuple[LayerPlan, ...]]) -> bool:
    return reader.kind in CARRIES_PARTIAL or reader.name in options
