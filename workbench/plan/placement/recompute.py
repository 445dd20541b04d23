"""The segments of layers that are recomputed in the backward pass.

A layer saves what its backward pass needs, from forward until then. Layers that are recomputed save
nothing: successive ones in the order of execution form one segment, of which only the inputs are
saved. When the gradient of its outputs is there, the segment's forward pass runs once more, and
then its backward pass.

    memory    a segment's activations live from the start of its own backward pass to its end. At
              any time the tensors saved outside of segments, every segment's inputs, and one
              segment's activations are alive; hence excluding layers makes it smaller
    compute   one more forward pass of the recomputed layers
    traffic   conversions between two layers of a segment communicate once more, at that moment,
              on all ranks; those at its borders do not

The results are the same: masks of dropout follow from step, row and feature, and running statistics
count a batch once.

Source: Chen et al. 2016 (arXiv:1604.06174); whether conversions are repeated or kept is a choice,
see Korthikanti et al. 2022 (arXiv:2205.05198, sec. 5).
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from fnmatch import fnmatchcase

from workbench.plan.errors import PlanError, unknown
from workbench.plan.graph import Graph
from workbench.plan.placement.choice import LayerPlan


def segments_of(graph: Graph, chosen: Set[str], apart: Set[str]) -> tuple[tuple[str, ...], ...]:
    """The segments of chosen layers, in execution order.

    Parameters and sizes depend on no sample and end no segment.

    Args:
        graph: the model.
        chosen: the names of the layers to recompute.
        apart: the layers that run separately from the others, as a tail in rounds does.
    """
    runs: list[list[str]] = []
    going: bool | None = None  # whether the current run is one of `apart`
    for layer in graph.layers:
        if layer.rows == 0:
            continue
        if layer.name not in chosen:
            going = None
            continue
        if going is not (layer.name in apart):
            runs.append([])
            going = layer.name in apart
        runs[-1].append(layer.name)
    return tuple(map(tuple, runs))


def matching(patterns: Iterable[str], graph: Graph) -> list[str]:
    """The layers with these names, and those that match a pattern and process samples.

    Raises:
        PlanError: nothing matches; the nearest names are suggested.
    """
    seeing = [layer.name for layer in graph.layers if layer.rows]
    every = {layer.name for layer in graph.layers}
    found: list[str] = []
    for pattern in patterns:
        fitting = [name for name in seeing if fnmatchcase(name, pattern)]
        if pattern in every:
            fitting = [pattern]  # refused later, with its reason
        if not fitting:
            raise PlanError(unknown("layer", pattern, seeing, of=graph.source.name))
        found += fitting
    return found


def choose(
    names: Iterable[str], choices: Mapping[str, LayerPlan], recompute: bool
) -> dict[str, LayerPlan]:
    """A plan's choices, in which these layers are recomputed or are not."""
    found = dict(choices)
    for name in names:
        found[name] = replace(found.get(name, LayerPlan()), recompute=recompute)
        if found[name] == LayerPlan():
            del found[name]  # the default of most layers
    return found
