"""How a run begins: new engines for dead ones, initial weights, then its ranks."""

from dataclasses import dataclass
from pathlib import Path

from workbench.cluster.assistant import Assistant
from workbench.cluster.dispatch import Dispatch
from workbench.cluster.engines import Engines
from workbench.cluster.job import Job
from workbench.cluster.run import Run


@dataclass(frozen=True)
class Beginning:
    """What a run begins with, on engines that were taken for it. Called on the run's thread.

    Attributes:
        task: "module:function" that each rank calls.
        places: the engine of each rank.
        packed: the experiment, as a control message.
        weights: the file of the initial weights; None: the assistant makes it.
        resume: the checkpoint to go on from, if any.
    """

    task: str
    places: tuple[int, ...]
    packed: bytes
    weights: Path | None
    resume: Path | None

    def __call__(
        self, engines: Engines, assistant: Assistant, dispatch: Dispatch, run: Run
    ) -> Job | None:
        """Starts the ranks; None where the run was stopped before.

        Raises:
            ClusterError: an engine could not be replaced.
            RunError: the weights could not be made.
        """
        if dead := [place for place in self.places if engines.death(place)]:
            print(f"new engines are started in the place of {dead}, which had died")
            engines.ensure(dead)
            run.notes.append(f"engines {dead} had died before and were replaced")
        weights = self.weights or assistant.weights(self.packed)
        if run.is_stopping:
            return None
        shared = {"weights": weights, "directory": run.directory, "resume": self.resume}
        return dispatch.start(self.task, self.packed, self.places, shared, streams=True)
