"""How the placement rules (`plan/placing.py`) decide on one layer, given what it depends on.

A layer's layouts follow from what its inputs give, and from the wish of one layer behind it:
that which is reached by going on to the first reader until one has a scheme. Hence every layer
can be asked by itself, and a search can go through the graph layer by layer.
"""

from collections.abc import Hashable, Mapping, Sequence

from workbench.plan.choice import LayerPlan
from workbench.plan.graph import Graph, Layer
from workbench.plan.layout import Layout
from workbench.plan.placing import Placing, read_without_scheme
from workbench.plan.rules import SPLITTABLE, after, joins
from workbench.predict.search.space.choices import Wish, wishes, wishing


class Following:
    """The rules, layer by layer.

    Args:
        graph: the model.
        options: of each layer that can be split.
    """

    def __init__(self, graph: Graph, options: Mapping[str, Sequence[LayerPlan]]) -> None:
        self.graph = graph
        self.wishes = wishes(graph, options)
        self.wishers = _wishers(graph)
        able = [layer for layer in graph.layers if layer.kind in SPLITTABLE]
        # Where all layers wish alike, each layer sees what it does where only its wisher does so.
        self._uniform = {
            wish: Placing(graph, {layer.name: wishing(layer, wish) for layer in able})
            for wish in self.wishes
        }
        kinds: dict[Hashable, int] = {}
        self._kinds = {
            layer.name: kinds.setdefault((_shape(layer), self.alike(layer.name)), len(kinds))
            for layer in graph.layers
        }
        self._known: dict[Hashable, dict[tuple[Layout, Layout], frozenset[Wish]]] = {}

    def followed(
        self, layer: Layer, coming: tuple[Layout, ...]
    ) -> dict[tuple[Layout, Layout], frozenset[Wish]]:
        """Of a layer without a scheme: under which of its wisher's wishes it reads and gives what.

        Args:
            layer: the layer.
            coming: the layouts of what it reads.
        """
        key = (self._kinds[layer.name], coming)
        if key not in self._known:
            self._known[key] = self._followed(layer, coming)
        return self._known[key]

    def alike(self, name: str) -> Hashable:
        """Equal for layers of one shape that follow alike."""
        heard = tuple(
            (placing.wishes[name], placing.gathered.get(name)) for placing in self._uniform.values()
        )
        shapes = (
            self.graph.input_shape if read == "input" else self.graph[read].output_shape
            for read in self.graph[name].inputs
        )
        hears = name in self.wishers
        return heard, tuple(shapes), name in self.graph.shares_weights, hears

    def _followed(
        self, layer: Layer, coming: tuple[Layout, ...]
    ) -> dict[tuple[Layout, Layout], frozenset[Wish]]:
        found: dict[tuple[Layout, Layout], frozenset[Wish]] = {}
        for wish in self.wishes if layer.name in self.wishers else self.wishes[:1]:
            heard = self._uniform[wish]
            gathered = heard.gathered.get(layer.name)
            read = read_without_scheme(
                self.graph, layer, coming, heard.wishes[layer.name], gathered
            )
            place = (read, after(layer, read))
            found[place] = found.get(place, frozenset()) | {wish}
        return found


def _shape(layer: Layer) -> Hashable:
    """What of a layer itself the rules look at."""
    shapes = layer.input_shape, layer.output_shape, layer.rows
    return layer.kind, shapes, bool(layer.inputs), joins(layer)


def _wishers(graph: Graph) -> dict[str, str]:
    """For each layer without a scheme, the layer whose wish it hears; none: at the outputs."""
    found: dict[str, str] = {}
    for layer in reversed(graph.layers):
        readers = graph.consumers[layer.name]
        if layer.kind in SPLITTABLE or not readers:
            continue
        first = readers[0]
        if graph[first].kind in SPLITTABLE:
            found[layer.name] = first
        elif first in found:
            found[layer.name] = found[first]
    return found
