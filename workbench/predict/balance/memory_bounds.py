"""How much of a model, and of a batch, the memory of each rank has room for.

Rows come first: a fast device with little memory computes as many as fit, and stores fewer filters.
"""

from collections.abc import Callable, Sequence
from functools import partial

from workbench.plan.errors import PlanError
from workbench.plan.experiment import Experiment
from workbench.plan.placement import apportion
from workbench.plan.plan import Plan
from workbench.predict.balance.times import UNITS, Times
from workbench.predict.prediction import predict
from workbench.predict.search.limit import bytes_of, shown

Limit = float | str | Sequence[float | str]


def limits_of(limit: Limit, ranks: int) -> tuple[int, ...]:
    """Bytes of each rank.

    Args:
        limit: of all of them, or one for each; numbers, or text such as "2GiB".
        ranks: their number.

    Raises:
        PlanError: no such bytes, or not one for each rank.
    """
    if isinstance(limit, str | int | float):
        return (bytes_of(limit),) * ranks
    if len(limit) != ranks:
        raise PlanError(f"memory_limit has {len(limit)} entries for {ranks} ranks: {limit!r}")
    return tuple(map(bytes_of, limit))


def most_rows(experiment: Experiment, limits: Sequence[int], times: Times) -> list[int]:
    """Rows that each rank has room for, at most the batch, if it holds no part of what is cut."""
    batch, world, k = experiment.batch_size, len(limits), times.group_size

    def needed(rank: int, rows: int) -> int:
        plan = times.plan if k == 1 else _with_parts(times, rank % k, 0)
        shared_out = plan.with_rows(_one_has(rank, rows, batch, world))
        return predict(shared_out, None, experiment).memory[rank].peak_bytes

    return [_most(batch, limit, partial(needed, rank)) for rank, limit in enumerate(limits)]


def most_parts(
    experiment: Experiment, limits: Sequence[int], times: Times, rows: Sequence[int]
) -> list[int]:
    """64ths of all that is cut which each member of a group has room for, with these rows.

    Raises:
        PlanError: some rank has no room for its rows alone.
    """
    k = times.group_size

    def needed(rank: int, units: int) -> int:
        plan = _with_parts(times, rank % k, units).with_rows(rows)
        return predict(plan, None, experiment).memory[rank].peak_bytes

    for rank, limit in enumerate(limits):
        if (least := needed(rank, 0)) > limit:
            raise PlanError(
                f"rank {rank} needs {shown(least)} for its {rows[rank]} rows, without any part of "
                f"what is cut, and has {shown(limit)}"
            )
    found = [_most(UNITS, limit, partial(needed, rank)) for rank, limit in enumerate(limits)]
    return [min(found[member::k]) for member in range(k)]


def _most(upper: int, limit: int, needed: Callable[[int], int]) -> int:
    """The largest number up to `upper` that needs no more than the limit; 0: none does."""
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= limit else (low, middle - 1)
    return low


def _one_has(index: int, count: int, total: int, receivers: int) -> tuple[float, ...]:
    """Shares of which one receiver has so much of a total, and the others the rest alike."""
    rest = (total - count) / max(1, receivers - 1)
    return tuple(float(count) if i == index else rest for i in range(receivers))


def _with_parts(times: Times, member: int, units: int) -> Plan:
    """The plan in which one member of every group has so many 64ths of all that is cut.

    Raises:
        PlanError: groups are of several sizes.
    """
    if len({times.plan.layers[name].group_size for name in times.cuts.units}) > 1:
        raise PlanError("memory is shared out over groups of one size, and the plan has several")
    shares = _one_has(member, units, UNITS, times.group_size)
    sizes = {name: apportion(n, shares) for name, n in times.cuts.units.items()}
    return times.cuts.with_sizes(sizes, times.plan.world_size)
