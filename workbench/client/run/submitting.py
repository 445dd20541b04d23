"""From an experiment to one job specification: what the server has to know before it starts."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from workbench.client.calibration import cache
from workbench.client.engines import Engines
from workbench.client.run.run import Run
from workbench.model.errors import ModelError
from workbench.model.weights.exchange import read_weights
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.graph.graph import Graph
from workbench.plan.io.errors import ExperimentError, MachineError, PlanError
from workbench.predict.prediction import predict
from workbench.store import messages, run_folder
from workbench.store.errors import ClusterError
from workbench.store.record import Request
from workbench.store.run_folder import damaged_files
from workbench.train.checkpoint.checkpoint import Checkpoint, CheckpointError, latest, load

Weights = str | Path | Mapping[str, Tensor] | None
"""A file or folder that `read_weights` reads, tensors by name, or None: the usual values."""


def request(
    engines: Engines,
    experiment: Experiment,
    *,
    priority: int = 0,
    tag: str = "",
    name: str = "",
    module: nn.Module | None = None,
    weights: Weights = None,
    resume: str | Path | Run | None = None,
    directory: Path | None = None,
) -> Request:
    """What is submitted; makes the run's folder.

    Args:
        experiment: what to run; its own objects are files.
        name: the job's name; "": its model's.
        module: a module with other values than the one that was traced; see `Cluster.train`.
        weights: other initial values; see `Cluster.train`.
        resume: a checkpoint, or a run that left one, to go on from.
        directory: the folder of a run that goes on; None: a new one.

    Raises:
        ClusterError: the plan needs more engines than are here, the run left no checkpoint or has
            made all steps, or there are both weights and something to go on from.
        CheckpointError: the checkpoint or the weights are damaged, missing or of another model.
        ModelError: `module` is needed and missing, or is another model than was traced.
        OSError: the disk is full.
    """
    engines.require(experiment.plan)
    checkpoint = None if resume is None else checkpoint_of(resume, experiment.plan.graph)
    link = engines.link
    packed = link.packed(experiment)
    if resume is not None and weights is not None:
        raise ClusterError(
            "a run that goes on has the weights of its checkpoint: give resume or weights, not both"
        )
    if directory is None and checkpoint is not None and checkpoint.step >= experiment.steps:
        raise ClusterError(
            f"all {experiment.steps} steps are done in {checkpoint.path}; for more of them, "
            "cluster.train(experiment.replace(steps=...), resume=run)"
        )
    path = checkpoint and checkpoint.path
    values = path or initial_values(experiment, module, weights, engines.folder)
    if directory is None:
        directory = run_folder.new_directory(engines.directory, experiment)
        if values is not None and checkpoint is None:
            run_folder.keep_initial(values, directory)
    keywords = {"weights": values, "directory": directory, "resume": path}
    return Request(
        kind="train",
        name=name or experiment.plan.graph.source.name,
        task=engines.task,
        packed=packed,
        keywords=messages.pack_keywords(keywords, link.key),
        engines=experiment.plan.world_size,
        directory=str(directory),
        priority=priority,
        seconds=_seconds(engines, experiment),
        memory_bytes=predict(experiment.plan, None, experiment).memory.peak_bytes,
        steps=experiment.steps,
        tag=tag,
        needs_weights=values is None,
    )


def initial_values(
    experiment: Experiment, module: nn.Module | None, weights: Weights, folder: Path
) -> Path | None:
    """As `module_values`, where no other weights are given; else these.

    Raises:
        CheckpointError: the weights are damaged, missing or of another model.
        ModelError: the cause of `module_values`.
    """
    if weights is None:
        return module_values(experiment, module, folder)
    graph = experiment.plan.graph
    _require_structure(graph)
    given = weights if isinstance(weights, Mapping) else read_weights(weights)
    own = graph.source.module if module is None else module
    return initialize(graph, experiment.seed, folder / "weights", module=own, given=given)


def module_values(experiment: Experiment, module: nn.Module | None, folder: Path) -> Path | None:
    """Writes the values of a user's own module, here and now; None for a model by name.

    Args:
        module: a module with other values than the one that was traced here; None: that one.

    Raises:
        ModelError: the module was traced elsewhere, and none is given; or it is another one than
            was traced.
    """
    graph = experiment.plan.graph
    if graph.source.kind != "module":
        return None
    _require_structure(graph)
    values = graph.source.module if module is None else module
    if values is None:
        name = graph.source.name
        raise ModelError(
            f"{name} was not traced in this process, so its values are not here: trace it again, "
            f"or give it, module={name}(...)"
        )
    return initialize(graph, experiment.seed, folder / "weights", module=values)


def _require_structure(graph: Graph) -> None:
    """Checks that ranks can build the model: of a module of one's own, from what was traced."""
    if graph.source.kind == "module" and graph.source.skeleton is None:
        raise ModelError(
            f"{graph.source.name} is a module of your own, and the text of an experiment does not "
            "hold its structure: trace it again, and read the text with it, "
            "wb.Experiment.load(path, graph)"
        )


def checkpoint_of(resume: str | Path | Run, graph: Graph) -> Checkpoint:
    """The checkpoint to go on from, after a look that it is whole, and of this model.

    Raises:
        ClusterError: the run left no checkpoint.
        CheckpointError: the checkpoint is damaged, missing or of another model.
    """
    if isinstance(resume, Run):
        path = resume.checkpoint
    else:
        path = latest(Path(resume).resolve()) or Path(resume).resolve()
    if path is None:
        raise ClusterError(f"{resume!r} left no checkpoint: train it anew, without resume=")
    found = load(path, graph)
    if damaged := damaged_files(path):
        raise CheckpointError(
            f"{path} is damaged: the bytes of {', '.join(damaged)} are not those that were written"
        )
    return found


def on_ranks(experiment: Experiment, world_size: int) -> Experiment | None:
    """The experiment on another number of ranks, in the same batches; None where it cannot be."""
    try:
        return experiment.replace(plan=experiment.plan.with_world_size(world_size))
    except (PlanError, ExperimentError):
        return None


def _seconds(engines: Engines, experiment: Experiment) -> float | None:
    """Predicted duration; None where these engines were never calibrated for its layers."""
    devices = engines.devices[: experiment.plan.world_size]
    machine = engines.machines.kept(cache.fingerprint(devices, engines.hosts))
    if machine is None:
        return None
    try:
        return predict(experiment.plan, machine, experiment).step_time * experiment.steps
    except (MachineError, ExperimentError):
        return None
