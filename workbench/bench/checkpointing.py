"""What checkpoints that are written beside the steps cost these steps.

    steps    | 10 with one under way | 10 without | 10 with one under way | 10 without ...

Both kinds of steps are of one run, in turns, so that whatever else changes on a machine changes
both. A block's time is from the row of the step before it to its last step's: the copy and the
wait for an earlier checkpoint, which lie between two steps, are in it.
"""

from collections.abc import Sequence

from workbench.client.cluster import Cluster
from workbench.plan.experiment import Experiment
from workbench.plan.metrics import Row

BLOCK = 10  # steps
END_S = 600.0


def costs(cluster: Cluster, experiment: Experiment, pairs: int) -> list[float]:
    """What a checkpoint every `BLOCK` steps adds to their time, as a part of it: one for each pair.

    Args:
        cluster: to run on.
        experiment: that trains; how long, and when it is saved, is decided here.
        pairs: of blocks.
    """
    steps = (2 * pairs + 2) * BLOCK  # the first two blocks warm up
    run = cluster.train(experiment.replace(steps=steps, checkpoint_every=2 * BLOCK))
    return costs_in(run.wait(END_S).rows)


def costs_in(rows: Sequence[Row]) -> list[float]:
    """The same of the rows of a run that was saved every 2 `BLOCK` steps."""
    times = [row["time"] for row in sorted(rows, key=lambda row: row["step"]) if row["rank"] == 0]
    starts = range(2 * BLOCK - 1, len(times) - 2 * BLOCK, 2 * BLOCK)
    found = []
    for start in starts:
        begun, between, end = (times[start + n * BLOCK] for n in range(3))
        found.append((between - begun) / (end - between) - 1)
    return found
