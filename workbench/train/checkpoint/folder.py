"""The checkpoints in the directory of one run: their names, what each says of itself."""

import os
import shutil
import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from workbench.model.errors import CheckpointError
from workbench.model.weights.files import replacing
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.graph.graph import Graph
from workbench.plan.io.value import dump
from workbench.store.run_folder import META, checkpoint_path, complete_checkpoints

EXPERIMENT = "experiment.toml"


class Meta(BaseModel):
    """What `checkpoint.toml` says."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal["workbench checkpoint 1"] = "workbench checkpoint 1"
    step: NonNegativeInt
    model: str
    input_shape: list[int] | dict[str, list[int]]
    fingerprint: str


def begin(directory: Path, step: int) -> Path:
    """An empty folder to write this step's checkpoint in; removes what was given up before."""
    for left in (*directory.glob("step-*.tmp"), *directory.glob("step-*.old")):
        shutil.rmtree(left)
    part = partial(directory, step)
    part.mkdir(parents=True)
    return part


def partial(directory: Path, step: int) -> Path:
    """Where the checkpoint of this step is written."""
    return checkpoint_path(directory, step).with_suffix(".tmp")


def describe(part: Path, step: int, experiment: Experiment) -> None:
    """Writes what a checkpoint says of itself."""
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
    partial(directory, step).rename(final)
    _sync(directory)
    shutil.rmtree(old, ignore_errors=True)


def _sync(directory: Path) -> None:
    """Returns once the names in a folder are on the disk."""
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
