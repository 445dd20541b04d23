"""Trained weights, whole again: for the module that the model was traced from."""

from pathlib import Path

from torch import Tensor

from workbench.plan.graph import Graph
from workbench.train.checkpoint.checkpoint import load

StateDict = dict[str, Tensor]


def state_dict(checkpoint: Path, graph: Graph) -> StateDict:
    """What `module.load_state_dict` takes, from the pieces of a checkpoint under any plan.

    Args:
        checkpoint: its folder.
        graph: of the model.

    Returns:
        What the module's own `state_dict` has: every parameter and persistent buffer, under all
        its names, in memory of its own; tensors that have several names are one.

    Raises:
        CheckpointError: it is missing, damaged, or of another model.
    """
    reader = load(checkpoint, graph).reader
    found: StateDict = {}
    weights = (weight for layer in graph.layers for weight in layer.weights)
    for weight in (weight for weight in weights if weight.persistent):
        tensor = reader.read(weight.name)
        found |= dict.fromkeys((weight.name, *weight.aliases), tensor)
    return found
