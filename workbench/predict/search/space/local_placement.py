"""How the placement rules (`plan/placing.py`) decide on one layer, given what it depends on.

A layer's layouts follow from the layouts of its inputs and from the preference of one layer behind
it, its decider: the one reached by going on to the first reader until a layer has a scheme. Hence
every layer can be placed by itself, and a search can go through the graph layer by layer.
"""

from collections.abc import Hashable, Mapping, Sequence

from workbench.plan.choice import LayerPlan
from workbench.plan.graph import Graph, Layer
from workbench.plan.layout import Layout
from workbench.plan.placing import Placing, read_without_scheme
from workbench.plan.rules import SPLITTABLE, after, joins
from workbench.predict.search.space.choices import Preference, choice_preferring, preferences


class LocalPlacement:
    """The placement rules, layer by layer.

    Args:
        graph: the model.
        options: the choices of each layer that can be split.
    """

    def __init__(self, graph: Graph, options: Mapping[str, Sequence[LayerPlan]]) -> None:
        self.graph = graph
        self.preferences = preferences(graph, options)
        self.deciders = _deciders(graph)
        able = [layer for layer in graph.layers if layer.kind in SPLITTABLE]
        # Where all layers prefer the same, each one is placed as if only its decider did.
        self._uniform = {
            preference: Placing(
                graph, {layer.name: choice_preferring(layer, preference) for layer in able}
            )
            for preference in self.preferences
        }
        kinds: dict[Hashable, int] = {}
        self._kinds = {
            layer.name: kinds.setdefault((_shape(layer), self.alike(layer.name)), len(kinds))
            for layer in graph.layers
        }
        self._known: dict[Hashable, dict[tuple[Layout, Layout], frozenset[Preference]]] = {}

    def followed(
        self, layer: Layer, coming: tuple[Layout, ...]
    ) -> dict[tuple[Layout, Layout], frozenset[Preference]]:
        """Under which preferences of its decider a layer without a scheme reads and gives what.

        Args:
            layer: the layer.
            coming: the layouts of its inputs, before any conversion.
        """
        key = (self._kinds[layer.name], coming)
        if key not in self._known:
            self._known[key] = self._followed(layer, coming)
        return self._known[key]

    def alike(self, name: str) -> Hashable:
        """Equal for layers of one shape that follow alike."""
        heard = tuple(
            (placing.preferred[name], placing.gathered.get(name))
            for placing in self._uniform.values()
        )
        shapes = (
            self.graph.input_shape if read == "input" else self.graph[read].output_shape
            for read in self.graph[name].inputs
        )
        hears = name in self.deciders
        return heard, tuple(shapes), name in self.graph.shares_weights, hears

    def _followed(
        self, layer: Layer, coming: tuple[Layout, ...]
    ) -> dict[tuple[Layout, Layout], frozenset[Preference]]:
        found: dict[tuple[Layout, Layout], frozenset[Preference]] = {}
        for preference in self.preferences if layer.name in self.deciders else self.preferences[:1]:
            heard = self._uniform[preference]
            gathered = heard.gathered.get(layer.name)
            read = read_without_scheme(
                self.graph, layer, coming, heard.preferred[layer.name], gathered
            )
            place = (read, after(layer, read))
            found[place] = found.get(place, frozenset()) | {preference}
        return found


def _shape(layer: Layer) -> Hashable:
    """What of a layer itself the rules look at."""
    shapes = layer.input_shape, layer.output_shape, layer.rows
    return layer.kind, shapes, bool(layer.inputs), joins(layer)


def _deciders(graph: Graph) -> dict[str, str]:
    """For each layer without a scheme, its decider; the last layers have none."""
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
