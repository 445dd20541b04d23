"""Checkpoints: what a run needs to go on, under any plan and world size.

    <directory>/step-000050/
        checkpoint.toml            step, model, format
        experiment.toml            what was run; a person can read it, `Experiment.load` too
        index.toml                 which file holds which span of which logical tensor
        rank-00000.safetensors     each piece once, whichever of its holders wrote it

Logical tensors are the entries of the whole model's `state_dict`, and the optimizer's state as
`strategies/remembered.py` names it, what is in flight and what codecs have left out, as
`in_flight.py` does, and `loss_scale`: the scale of fp16 and the updates in a row. Where the data
stands needs no entry of its own: the rows of a step follow from the seed and the step. Trained
weights can be had whole again (`state_dict`).

A checkpoint is written as `step-000050.tmp` (`Saver`) and takes its name when all of it is there;
older ones are removed only after that.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from workbench.layers.cut_model import CutModel
from workbench.model.errors import CheckpointError
from workbench.model.weights.slices import PieceSet, expect
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.graph.graph import Graph, Input, shown
from workbench.plan.placement.placement import Shard
from workbench.store.run_folder import complete_checkpoints
from workbench.train.checkpoint import folder
from workbench.train.checkpoint.in_flight import IN_FLIGHT, RESIDUAL, InFlight, ages, kind
from workbench.train.strategies.optimizer import Updater
from workbench.train.strategies.remembered import EMA, entry
from workbench.train.strategies.rules import is_of_strategy

__all__ = ["LOSS_SCALE", "Checkpoint", "CheckpointError", "in_flight", "latest", "load", "restore"]

LOSS_SCALE = "loss_scale"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, opened.

    Attributes:
        path: its folder.
        step: steps made before it.
        reader: its logical tensors, to be read in any slices.
    """

    path: Path
    step: int
    reader: PieceSet

    def experiment(self) -> Experiment:
        """What was run when it was saved."""
        return Experiment.load(self.path / folder.EXPERIMENT)


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint in a run's directory, or None."""
    complete = complete_checkpoints(directory)
    return complete[max(complete)] if complete else None


def load(path: Path, graph: Graph) -> Checkpoint:
    """Opens a checkpoint and checks that it is whole, and of this model.

    Raises:
        CheckpointError: it is missing, incomplete, damaged, or of another model.
    """
    meta = folder.read_meta(path)
    reader = PieceSet(path)
    if meta.fingerprint != graph.fingerprint:
        weights = {weight.name: weight for layer in graph.layers for weight in layer.weights}
        apart = ("optimizer/", IN_FLIGHT, RESIDUAL, LOSS_SCALE)
        theirs = {name for name in reader.names if not name.startswith(apart)}
        expect(reader, weights.values(), of=str(path))
        only = sorted(theirs - set(weights))
        differ = (
            f"it also has {', '.join(only[:3])}" if only else "weights agree, operations do not"
        )
        raise CheckpointError(
            f"{path} is of another model: {meta.model} for {_inputs(meta)}, not "
            f"{graph.source.name} for {shown(graph.inputs)} as given; {differ}"
        )
    return Checkpoint(path, meta.step, reader)


def _inputs(meta: folder.Meta) -> str:
    """The shapes of what the model of a checkpoint reads, as `shown` gives them."""
    shape = meta.input_shape
    shapes = shape.items() if isinstance(shape, dict) else [("", shape)]
    return shown([Input(tuple(each), name=name) for name, each in shapes])


def restore(saved: Checkpoint, model: CutModel, updater: Updater) -> None:
    """Reads this rank's pieces of the optimizer's state, and the loss scale.

    Args:
        saved: the checkpoint, under any plan.
        model: this rank's part.
        updater: a new one of its trainable pieces. Its scale stays the first one if the run had
            none before.

    Raises:
        CheckpointError: another optimizer was saved.
    """
    names, known = set(saved.reader.names), updater.remembered
    missing = {
        state
        for name in model.trainable()
        for state in known[name].names
        if entry(state, name) not in names
    }
    of_strategy = {state for state in missing if is_of_strategy(state)}
    if of_strategy and missing == of_strategy:
        kept = " and ".join(sorted(state.rpartition(".")[2] for state in missing))
        raise CheckpointError(
            f"{saved.path} has no {kept} of the strategy: it was saved under "
            f"{saved.experiment().sync.title}, and can only go on under a strategy that remembers "
            "no more"
        )
    if missing == {EMA}:
        raise CheckpointError(
            f"{saved.path} has no averaged weights: it was saved without ema, and can only go on "
            "without"
        )
    if missing:
        raise CheckpointError(
            f"{saved.path} has no {' and '.join(sorted(missing))} for {updater.value!r}: it was "
            f"saved under {saved.experiment().optimizer!r}, and can only go on under such a one"
        )

    def read(state: str, name: str) -> Tensor:
        if state in known[name].numbers:
            return saved.reader.read(entry(state, name))
        return _read(saved.reader, entry(state, name), model, name)

    updater.load(read)
    if updater.scaling is not None and LOSS_SCALE in names:
        updater.scaling.load(saved.reader.read(LOSS_SCALE))


def in_flight(saved: Checkpoint, model: CutModel) -> list[InFlight]:
    """Reads this rank's pieces of what was computed and not yet used, the oldest first.

    Args:
        saved: the checkpoint, under any plan and strategy.
        model: this rank's part.
    """
    return [
        InFlight(
            saved.step - age,
            _pieces_of(saved, model, kind(age, "gradient")),
            _pieces_of(saved, model, kind(age, "weight")),
        )
        for age in ages(saved.reader.names)
    ]


def _pieces_of(saved: Checkpoint, model: CutModel, prefix: str) -> dict[str, Tensor]:
    """This rank's pieces of what is stored under this prefix, by the parameter's name."""
    there = set(saved.reader.names)
    return {
        name: _read(saved.reader, prefix + name, model, name)
        for name in model.trainable()
        if prefix + name in there
    }


def _read(reader: PieceSet, stored: str, model: CutModel, name: str) -> Tensor:
    """This rank's piece of a logical tensor that is cut as the parameter `name` is."""
    placed = model.placements[name]
    shard = placed.placement if isinstance(placed.placement, Shard) else None
    return reader.read(stored, shard, model.context.rank % placed.group_size)


StateDict = dict[str, Tensor]


def state_dict(checkpoint: Path, graph: Graph, *, ema: bool = False) -> StateDict:
    """What `module.load_state_dict` takes, from the pieces of a checkpoint under any plan.

    Args:
        checkpoint: its folder.
        graph: the graph of the model.
        ema: whether parameters that are trained have their averaged values.

    Returns:
        What the module's own `state_dict` has: every parameter and persistent buffer, under all
        its names, in memory of its own; tensors that have several names are one.

    Raises:
        CheckpointError: it is missing, damaged, or of another model; or it has no averages.
    """
    reader = load(checkpoint, graph).reader
    averages = {name for name in graph.trainable if ema}
    if any(entry(EMA, name) not in reader.names for name in averages):
        raise CheckpointError(
            f"{checkpoint} has no averaged weights: they are there if the experiment has ema"
        )
    found: StateDict = {}
    weights = (weight for layer in graph.layers for weight in layer.weights)
    for weight in (weight for weight in weights if weight.persistent):
        name = weight.name
        tensor = reader.read(entry(EMA, name) if name in averages else name)
        found |= dict.fromkeys((weight.name, *weight.aliases), tensor)
    return found
