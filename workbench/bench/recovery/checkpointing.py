"""The cost of checkpoints that are written beside the steps.

    steps    | 10 with one running | 10 without | 10 with one running | 10 without ...

Both kinds of steps are of one run, in turns, so that other changes on a machine affect both. A
block's time is from the row of the step before it to its last step's: it contains the copy and the
wait for an earlier checkpoint, which are between two steps.
"""

from collections.abc import Sequence

from workbench.client.cluster import Cluster
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.measured import Row

BLOCK = 10  # steps
END_S = 600.0


def costs(cluster: Cluster, experiment: Experiment, pairs: int) -> list[float]:
    """The relative increase of steps' time by a checkpoint every `BLOCK` steps, for each pair.

    Args:
        cluster: the cluster to run on.
        experiment: the experiment that trains; its length and its checkpoints are set here.
        pairs: the number of pairs of blocks.
    """
    steps = (2 * pairs + 2) * BLOCK  # the first two blocks warm up
    run = cluster.train(experiment.replace(steps=steps, checkpoint_every=2 * BLOCK))
    return costs_in(run.wait(END_S).rows)


def costs_in(rows: Sequence[Row]) -> list[float]:
    """The relative increases in the rows of a run that was saved every 2 `BLOCK` steps."""
    times = [row["time"] for row in sorted(rows, key=lambda row: row["step"]) if row["rank"] == 0]
    starts = range(2 * BLOCK - 1, len(times) - 2 * BLOCK, 2 * BLOCK)
    found = []
    for start in starts:
        begun, between, end = (times[start + n * BLOCK] for n in range(3))
        found.append((between - begun) / (end - between) - 1)
    return found
