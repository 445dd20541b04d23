"""Going on from what a run left."""

import weakref
from pathlib import Path
from typing import Protocol

from workbench.client.run.following import Job
from workbench.client.run.run import Run
from workbench.plan.graph import Graph
from workbench.store.checkpoints import damaged_files
from workbench.store.errors import ClusterError
from workbench.train.checkpoint.checkpoint import CheckpointError, latest, load


class Resuming(Protocol):
    """Whoever has engines for a run that goes on."""

    def resuming(self, run: Run) -> Job: ...


def again(cluster: weakref.ref[Resuming], run: Run) -> Job:
    """The job of a run that goes on; a run that has ended does not keep its cluster alive."""
    found = cluster()
    if found is None:
        raise ClusterError(
            f"the cluster of {run!r} is gone; another one can go on: "
            "cluster.train(run.experiment, resume=run)"
        )
    return found.resuming(run)


def checkpoint_of(resume: str | Path | Run | None, graph: Graph) -> Path | None:
    """The checkpoint to go on from; known to be whole, and of this model."""
    if resume is None:
        return None
    if isinstance(resume, Run):
        path = resume.checkpoint
    else:
        path = latest(Path(resume).resolve()) or Path(resume).resolve()
    if path is None:
        raise ClusterError(f"{resume!r} left no checkpoint to go on from")
    found = load(path, graph).path
    if damaged := damaged_files(found):
        raise CheckpointError(
            f"{found} is damaged: the bytes of {', '.join(damaged)} are not those that were written"
        )
    return found
