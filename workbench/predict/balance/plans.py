"""Plans whose shares are those that a machine's devices end together with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from workbench.plan.errors import MachineError, PlanError
from workbench.plan.experiment import Experiment
from workbench.plan.machine import Machine
from workbench.plan.plan import Plan
from workbench.plan.work import work_of
from workbench.predict.balance.partition import Partition, partition
from workbench.predict.balance.time_model import Kind, Point, TimeModel

Split = Literal["rows", "filters"]
UNITS = 64  # into which filters are divided; a layer rounds them to its grain
_SIZES = (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class Balanced:
    """A plan in which unequal devices end their computing together, as a machine says.

    Attributes:
        plan: with shares of rows or of filters.
        split: which of both.
        partition: units of each device, and its seconds of computing in a step.
        equal_s: of the slowest device, with equal shares.
        alone_s: of each device, with all of the work.
    """

    plan: Plan
    split: Split
    partition: Partition
    equal_s: float
    alone_s: tuple[float, ...]

    @property
    def gain_over_equal(self) -> float:
        """How many times faster than with equal shares, computing alone."""
        return self.equal_s / self.partition.end_s

    @property
    def gain_over_fastest_alone(self) -> float:
        """How many times faster than the fastest device by itself, computing alone."""
        return min(self.alone_s) / self.partition.end_s

    def __repr__(self) -> str:
        sizes = ":".join(map(str, self.partition.sizes))
        return (
            f"<Balanced {self.plan.graph.source.name}: {self.split} {sizes}, "
            f"{self.gain_over_equal:.2f} x equal shares, "
            f"{self.gain_over_fastest_alone:.2f} x the fastest alone>"
        )


def balanced(
    experiment: Experiment,
    machine: Machine,
    *,
    split: Split = "rows",
    kind: Kind = "linear",
    least: int = 0,
    most: Sequence[int | None] | None = None,
    overheads_s: Sequence[float] | None = None,
    grain: int = 8,
) -> Balanced:
    """Shares for the devices of a machine, from the times of the model's layers on each.

    Args:
        experiment: whose plan's model is trained, with this batch; of "rows" the plan is kept,
            and gets other rows; of "filters" it is made anew over all ranks.
        machine: with a device for each rank.
        split: what is shared out: the rows of a batch, or every layer's filters.
        kind: what is believed between measured sizes.
        least: units of every device (rows, or 64ths of the filters); 0: it may be left out.
        most: units that each device's memory allows; None: any number.
        overheads_s: seconds of communication where 1, 2, ... devices are used.
        grain: of filters.

    Raises:
        MachineError: the machine has no device for some rank.
        PlanError: no such split, or bounds that leave no way to share out.

    Source: Moreno-Alvarez et al. 2020 and 2021, with functional performance models.
    """
    world = experiment.plan.world_size
    if len(machine.devices) not in (1, world):
        raise MachineError(
            f"machine {machine.name!r} has {len(machine.devices)} devices, the plan {world} ranks"
        )
    if split not in ("rows", "filters"):
        raise PlanError(f"there is no split {split!r}; 'rows' and 'filters' are valid")
    if split == "rows":
        total = experiment.batch_size
        sizes = sorted({max(1, total // part) for part in _SIZES})
    else:
        total, sizes = UNITS, [UNITS // part for part in _SIZES]
    models = [
        TimeModel(tuple(Point(d, _seconds(experiment, machine, split, r, d)) for d in sizes), kind)
        for r in range(world)
    ]
    try:
        found = partition(total, models, least=least, most=most, overheads_s=overheads_s)
        equal = partition(total, [TimeModel((Point(1, 1.0),))] * world)
    except ValueError as error:
        raise PlanError(f"no {split} can be shared out like this: {error}") from error
    tables = [model.seconds(total) for model in models]
    equal_s = max(float(t[d]) for t, d in zip(tables, equal.sizes, strict=True))
    alone_s = tuple(float(table[total]) for table in tables)
    if split == "rows":
        plan = experiment.plan.with_rows(found.sizes)
    else:
        plan = Plan.filters(experiment.plan.graph, world, found.sizes, grain=grain)
    return Balanced(plan, split, found, equal_s, alone_s)


def _seconds(
    experiment: Experiment, machine: Machine, split: Split, rank: int, units: int
) -> float:
    """Computing of one step on one device, which has so many rows, or 64ths of the filters."""
    graph, device = experiment.plan.graph, machine.device(rank)
    rows: tuple[int, ...] = (units,)
    if split == "rows":
        plan = Plan.data_parallel(graph, 1)
    else:
        shares = (units, UNITS - units)
        plan = Plan.filters(graph, 2, shares, grain=1).with_rows(None)
        rows = plan.rows_of(experiment.batch_size)
    total = 0.0
    for layer in graph.layers:
        if layer.kind in ("parameter", "size"):
            continue
        estimate = device.seconds(work_of(plan, layer, 0, rows, experiment.precision))
        total += estimate.forward_s + estimate.backward_s
    return total
