"""How a step's batch is cut into micro-batches, and these into the rows of each rank."""

from workbench.plan.experiment import Experiment
from workbench.plan.placement import apportion


def micro_batches(experiment: Experiment) -> list[tuple[int, ...]]:
    """For each micro-batch of a step, the rows of each rank."""
    ranks = (1,) * experiment.plan.world_size
    counts = apportion(experiment.batch_size, (1,) * experiment.accumulate)
    return [apportion(count, ranks) for count in counts]
