"""Checkpoints: what a run needs to go on, under any plan and world size.

    <directory>/step-000050/
        checkpoint.toml            step, model, format
        experiment.toml            what was run; a person can read it, `Experiment.load` too
        index.toml                 which file holds which span of which logical tensor
        rank-00000.safetensors     each piece once, whichever of its holders wrote it

Logical tensors are the entries of the whole model's `state_dict`, and the optimizer's state as
`optimizer/state.py` names it, what is in flight and what codecs have left out, as `step/state.py`
does, and `loss_scale`: the scale of fp16 and the updates in a row. Where the data
stands needs no entry of its own: the rows of a step follow from the seed and the step. Trained
weights can be had whole again (`state_dict`).

A checkpoint is written as `step-000050.tmp` (`Saver`) and takes its name when all of it is there;
older ones are removed only after that.
"""

import os
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError
from torch import Tensor

from workbench.layers.cut_model import CutModel
from workbench.model.errors import CheckpointError
from workbench.model.weights.files import replacing
from workbench.model.weights.slices import PieceSet, expect
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.graph.graph import Graph, Input, shown
from workbench.plan.io.value import dump
from workbench.plan.placement.placement import Shard
from workbench.store.run_folder import META, checkpoint_path, complete_checkpoints
from workbench.train.optimizer.optimizer import Updater
from workbench.train.optimizer.rules import is_of_strategy
from workbench.train.optimizer.state import EMA, entry
from workbench.train.step.state import IN_FLIGHT, RESIDUAL, InFlight, ages, kind

EXPERIMENT = "experiment.toml"


class Meta(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal["workbench checkpoint 1"] = "workbench checkpoint 1"
    step: NonNegativeInt
    model: str
    input_shape: list[int] | dict[str, list[int]]
    fingerprint: str


def begin_folder(directory: Path, step: int) -> Path:
    """An empty folder to write this step's checkpoint in; removes what was given up before."""
    for left in (*directory.glob("step-*.tmp"), *directory.glob("step-*.old")):
        shutil.rmtree(left)
    part = partial_path(directory, step)
    part.mkdir(parents=True)
    return part


def partial_path(directory: Path, step: int) -> Path:
    return checkpoint_path(directory, step).with_suffix(".tmp")


def describe(part: Path, step: int, experiment: Experiment) -> None:
    with replacing(part / EXPERIMENT) as file:
        experiment.save(file)
    graph = experiment.plan.graph
    meta = Meta(
        step=step,
        model=graph.source.name,
        input_shape=_shapes(graph),
        fingerprint=graph.fingerprint,
    )
    with replacing(part / META) as file:
        file.write_text(dump({"checkpoint": meta.model_dump()}))


def _shapes(graph: Graph) -> list[int] | dict[str, list[int]]:
    """The shape of one sample; of several inputs, of each by its name."""
    if len(graph.inputs) == 1:
        return list(graph.input_shape)
    return {one.name: list(one.shape) for one in graph.inputs}


def publish(directory: Path, step: int) -> None:
    """Gives a complete checkpoint its name, to stay; one of the same step is replaced.

    The name is on the disk before anything older is removed: no failure of power leaves neither.
    """
    final = checkpoint_path(directory, step)
    old = final.with_suffix(".old")
    if final.exists():
        final.rename(old)
    partial_path(directory, step).rename(final)
    _sync(directory)
    shutil.rmtree(old, ignore_errors=True)


def _sync(directory: Path) -> None:
    folder = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def prune(directory: Path, step: int, keep: int, best: int = 0) -> None:
    """Removes all but the newest `keep` checkpoints up to this step, and the best one.

    Later ones, of a run that was taken back, are not ours to remove.
    """
    there = complete_checkpoints(directory)
    old = sorted(number for number in there if number <= step)[:-keep]
    for other in (number for number in old if number != best):
        shutil.rmtree(there[other], ignore_errors=True)


def read_meta(path: Path) -> Meta:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: it is missing, incomplete or damaged.
    """
    try:
        text = (path / META).read_text()
        return Meta.model_validate(tomllib.loads(text).get("checkpoint"))
    except OSError:
        there = [str(other) for other in complete_checkpoints(path.parent).values()]
        known = f"; there are {', '.join(there)}" if there else ""
        raise CheckpointError(f"{path} is no complete checkpoint{known}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValidationError) as error:
        raise CheckpointError(f"{path / META} is damaged: {error}") from error


__all__ = ["LOSS_SCALE", "Checkpoint", "CheckpointError", "in_flight", "latest", "load", "restore"]

LOSS_SCALE = "loss_scale"


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    reader: PieceSet

    def experiment(self) -> Experiment:
        return Experiment.load(self.path / EXPERIMENT)


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint in a run's directory, or None."""
    complete = complete_checkpoints(directory)
    return complete[max(complete)] if complete else None


def load(path: Path, graph: Graph) -> Checkpoint:
    """Opens a checkpoint and checks that it is whole, and of this model.

    Raises:
        CheckpointError: it is missing, incomplete, damaged, or of another model.
    """
    meta = read_meta(path)
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


def _inputs(meta: Meta) -> str:
    """The shapes of what the model of a checkpoint reads, as `shown` gives them."""
    shape = meta.input_shape
    shapes = shape.items() if isinstance(shape, dict) else [("", shape)]
    return shown([Input(tuple(each), name=name) for name, each in shapes])


def restore(saved: Checkpoint, model: CutModel, updater: Updater) -> None:
    """Reads this rank's pieces of the optimizer's state, and the loss scale.

    Args:
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
    """Reads this rank's pieces of what was computed and not yet used, the oldest first."""
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
