"""How a step's batch is cut into micro-batches, and these into the rows of each rank."""

from workbench.plan.experiment import Experiment


def micro_batches(experiment: Experiment) -> list[tuple[int, ...]]:
    """For each micro-batch of a step, the rows of each rank."""
    world = experiment.plan.world_size
    counts = _even(experiment.batch_size, experiment.accumulate)
    return [_even(count, world) for count in counts]


def _even(total: int, parts: int) -> tuple[int, ...]:
    """As `apportion` with equal shares, also for very many: the first ones get one more."""
    size, more = divmod(total, parts)
    return (size + 1,) * more + (size,) * (parts - more)
