"""From an experiment to a job: what the server has to know of it before it starts."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from workbench.client.assistant import Assistant
from workbench.client.calibration import cache as calibrate_cache
from workbench.plan.errors import ExperimentError, MachineError, PlanError
from workbench.plan.experiment import Experiment
from workbench.plan.machine import Machine
from workbench.predict.prediction import predict
from workbench.store import message
from workbench.store import run_folder as files
from workbench.store.device import Device
from workbench.store.errors import ClusterError
from workbench.store.record import Request


@dataclass(frozen=True, kw_only=True)
class Terms:
    """On which an experiment is run.

    Attributes:
        task: "module:function" that each rank calls.
        priority: higher goes first.
        min_engines: fewest ranks that it goes on with; None: as many as its plan has.
        max_engines: most ranks that it grows to; None: likewise.
        tag: of the sweep that it is part of.
        name: of the job; "": its model's.
    """

    task: str
    priority: int = 0
    min_engines: int | None = None
    max_engines: int | None = None
    tag: str = ""
    name: str = ""


@dataclass(frozen=True)
class Submitter:
    """Makes requests for one cluster.

    Attributes:
        devices: of its engines.
        hosts: emulated ones, or None.
        directory: where runs keep their files.
        assistant: of the cluster.
    """

    devices: tuple[Device, ...]
    hosts: object
    directory: Path
    assistant: Assistant = field(repr=False)

    def request(
        self,
        experiment: Experiment,
        terms: Terms,
        *,
        module: nn.Module | None = None,
        checkpoint: Path | None = None,
        directory: Path | None = None,
    ) -> Request:
        """What is submitted; makes the run's folder.

        Args:
            experiment: what to run.
            terms: on which.
            module: the user's own, where the model was traced from one.
            checkpoint: to go on from.
            directory: of a run that goes on; None: a new one.

        Raises:
            ClusterError: numbers of engines that cannot be.
            ModelError: `module` is missing, or is another one than was traced.
            ControlMessageTooLarge: the model's own code is too large for a control message.
        """
        packed = message.pack(experiment)
        variants = {
            size: message.pack(other) for size, other in self._variants(experiment, terms).items()
        }
        values = checkpoint or self.assistant.values_of(experiment, module)
        if directory is None:
            directory = files.new_directory(self.directory, experiment)
        return Request(
            kind="train",
            name=terms.name or experiment.plan.graph.source.name,
            task=terms.task,
            packed=packed,
            # No weights: the server has the assistant make them.
            keywords=message.pack_keywords(
                {"weights": values, "directory": directory, "resume": checkpoint}
            ),
            engines=experiment.plan.world_size,
            directory=str(directory),
            priority=terms.priority,
            seconds=self._seconds(experiment),
            memory_bytes=predict(experiment.plan, None, experiment).memory.peak_bytes,
            min_engines=terms.min_engines,
            max_engines=terms.max_engines,
            variants=variants,
            steps=experiment.steps,
            tag=terms.tag,
        )

    def _variants(self, experiment: Experiment, terms: Terms) -> dict[int, Experiment]:
        """The experiment for each other number of ranks that it may have; some have no plan."""
        own = experiment.plan.world_size
        fewest = own if terms.min_engines is None else terms.min_engines
        most = own if terms.max_engines is None else terms.max_engines
        if not 1 <= fewest <= own <= most <= len(self.devices):
            raise ClusterError(
                f"an elastic job has 1 <= min_engines <= {own} ranks of its plan <= max_engines "
                f"<= {len(self.devices)} engines, got {fewest} and {most}"
            )
        found = {}
        for size in range(fewest, most + 1):
            if size != own and (plan := plan_for(experiment, size)) is not None:
                found[size] = plan
        return found

    def _seconds(self, experiment: Experiment) -> float | None:
        """Predicted duration; None where these engines were never calibrated for that."""
        devices = self.devices[: experiment.plan.world_size]
        machine = calibrate_cache.kept(calibrate_cache.fingerprint(devices, self.hosts))
        return None if machine is None else seconds_on(machine, experiment)


def plan_for(experiment: Experiment, world_size: int) -> Experiment | None:
    """The experiment on another number of ranks, in the same batches; None where it cannot be."""
    try:
        return experiment.replace(plan=experiment.plan.with_world_size(world_size))
    except (PlanError, ExperimentError):
        return None


def seconds_on(machine: Machine, experiment: Experiment) -> float | None:
    """Predicted duration on a machine; None where it has no times of these layers."""
    try:
        return predict(experiment.plan, machine, experiment).step_time * experiment.steps
    except (MachineError, ExperimentError):
        return None
