"""How a step's batch is cut into micro-batches, and these into the rows of each rank."""

from workbench.plan.experiment import Experiment
from workbench.plan.row_shares import shared_out


def micro_batches(experiment: Experiment) -> list[tuple[int, ...]]:
    """For each micro-batch of a step, the rows of each rank."""
    counts = shared_out(experiment.batch_size, None, experiment.accumulate)
    return [experiment.plan.rows_of(count) for count in counts]
