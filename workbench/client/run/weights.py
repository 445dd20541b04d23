"""The weights that a run has left, for a module of the user's own."""

from pathlib import Path

from workbench.plan.experiment.experiment import Experiment
from workbench.store.errors import ClusterError
from workbench.store.run_folder import Best, checkpoint_path
from workbench.train.checkpoint.checkpoint import StateDict, state_dict


def weights_of(
    directory: Path, experiment: Experiment, newest: Path | None, *, ema: bool, best: bool
) -> StateDict:
    """The weights and buffers of a checkpoint, whole.

    Args:
        newest: its newest checkpoint; None: there is none.
        ema: whether weights are the averaged ones.
        best: whether to take the checkpoint of the best evaluation.

    Raises:
        ClusterError: there is no such checkpoint.
        CheckpointError: it is damaged; or it has no averages.
    """
    graph = experiment.plan.graph
    if best:
        by = experiment.keep_best
        found = Best() if by is None else Best.of(directory, by)
        if found.done == 0:
            said = "its experiment has no keep_best" if by is None else f"by {by!r} there is none"
            raise ClusterError(f"{directory.name} has kept no best checkpoint: {said}")
        newest = checkpoint_path(directory, found.done)
    if newest is None:
        raise ClusterError(
            f"{directory.name} has no checkpoint: a run leaves one every checkpoint_every steps, "
            "at run.checkpoint_now(), and when it finishes or is stopped"
        )
    return state_dict(newest, graph, ema=ema)
