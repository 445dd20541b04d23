"""From a plan's choices to the placement of every activation and weight, and the conversions.

Three passes over the graph:

    prefer    from the outputs up: the layout in which each layer would like its input. Only
              a pending sum (P) has to choose a target without a reason of its own; it takes
              what its reader prefers.
    place     from the input down: each layer's input and output layout. Layers with a
              scheme are given theirs; the others keep what they get.
    route     each edge whose two ends differ gets its conversions, and each edge over which a
              gradient comes back as summands gets the sum, as far up as it may wait.

A gather stands where its tensor is smallest: VGG at 32x32 pools 512 features to 25,088 just
before its classifier, so that the rows are gathered before that pool.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from workbench.plan.choice import LayerPlan
from workbench.plan.graph import Graph
from workbench.plan.layout import ROWS, Conversion, Layout
from workbench.plan.placing import Placing
from workbench.plan.routing import conversions
from workbench.plan.weights import WeightPlacement, place_weight


@dataclass(frozen=True)
class Flow:
    """The placements that a plan leads to.

    Attributes:
        inputs: for each layer, the layout in which it reads its inputs.
        outputs: for each layer, the layout of what it gives ("input": the model's own input).
        edges: for each (producer, reader), the conversions between them, in order. Two
            readers whose conversions start alike share them.
        returns: for each output of the model, the conversions after it.
        weights: for each name of the state_dict, where it lies.
    """

    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    edges: Mapping[tuple[str, str], tuple[Conversion, ...]]
    returns: Mapping[str, tuple[Conversion, ...]]
    weights: Mapping[str, WeightPlacement]

    def returned(self, name: str) -> Layout:
        """The layout in which the model returns this output."""
        steps = self.returns[name]
        return steps[-1].target if steps else self.outputs[name]


def flow_of(
    graph: Graph,
    choices: Mapping[str, LayerPlan],
    held: Mapping[str, Layout] = MappingProxyType({}),
) -> Flow:
    """Places every activation and weight of `graph` under `choices`; others replicate.

    Args:
        graph: the model.
        choices: of its layers.
        held: the layouts in which these layers read, whatever comes.
    """
    placing = Placing(graph, choices, held)
    placing.place()
    edges, returns = conversions(graph, choices, placing.inputs, placing.outputs)
    weights: dict[str, WeightPlacement] = {}
    whole: dict[Hashable, WeightPlacement] = {}  # as most weights of most plans lie
    for layer in graph.layers:
        read = placing.inputs[layer.name]
        for weight in layer.weights:
            if read is not ROWS:
                weights[weight.name] = place_weight(layer, weight, read, choices)
                continue
            look = weight.shape, weight.dtype, weight.trainable
            known = whole.get(look)
            if known is None:
                known = whole[look] = place_weight(layer, weight, read, choices)
            weights[weight.name] = known
    return Flow(placing.inputs, placing.outputs, edges, returns, weights)
