"""One way to divide a step's work: rows, one share of all filters, or a share for each block.

Memory bounds the shares. Rows come first: a fast device with little memory computes as many rows as
fit, and stores fewer filters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.io.errors import PlanError
from workbench.plan.io.units import size
from workbench.plan.placement.placement import apportion
from workbench.plan.plans.plan import Plan
from workbench.predict.balance.partition import Partition, partition
from workbench.predict.balance.time_model import TimeModel
from workbench.predict.balance.times import UNITS, PlanTimes, Sizes
from workbench.predict.prediction import predict
from workbench.predict.search.refusal import bytes_of

Limit = float | str | Sequence[float | str]


def limits_of(limit: Limit, ranks: int) -> tuple[int, ...]:
    """The memory limit of each rank, in bytes.

    Args:
        limit: the limit of all ranks, or one for each; numbers, or text such as "2GiB".
        ranks: the number of ranks.

    Raises:
        PlanError: an invalid number of bytes, or not one for each rank.
    """
    if isinstance(limit, str | int | float):
        return (bytes_of(limit),) * ranks
    if len(limit) != ranks:
        raise PlanError(f"memory_limit has {len(limit)} entries for {ranks} ranks: {limit!r}")
    return tuple(map(bytes_of, limit))


def most_rows(experiment: Experiment, limits: Sequence[int], times: PlanTimes) -> list[int]:
    """The rows that fit on each rank, at most the batch, if it holds no sharded filters."""
    batch, world, k = experiment.batch_size, len(limits), times.group_size

    def needed(rank: int, rows: int) -> int:
        plan = times.plan if k == 1 else _with_parts(times, rank % k, 0)
        shared_out = plan.with_rows(_one_has(rank, rows, batch, world))
        return predict(shared_out, None, experiment).memory[rank].peak_bytes

    return [_most(batch, limit, partial(needed, rank)) for rank, limit in enumerate(limits)]


def most_parts(
    experiment: Experiment, limits: Sequence[int], times: PlanTimes, rows: Sequence[int]
) -> list[int]:
    """The 64ths of the sharded filters that fit on each member of a group, with these rows.

    Raises:
        PlanError: a rank has no room for its rows alone.
    """
    k = times.group_size

    def needed(rank: int, units: int) -> int:
        plan = _with_parts(times, rank % k, units).with_rows(rows)
        return predict(plan, None, experiment).memory[rank].peak_bytes

    for rank, limit in enumerate(limits):
        if (least := needed(rank, 0)) > limit:
            raise PlanError(
                f"rank {rank} needs {size(least)} for its {rows[rank]} rows, without any part of "
                f"what is cut, and has {size(limit)}"
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
    """Shares that give one receiver so much of a total, and the others equal parts of the rest."""
    rest = (total - count) / max(1, receivers - 1)
    return tuple(float(count) if i == index else rest for i in range(receivers))


def _with_parts(times: PlanTimes, member: int, units: int) -> Plan:
    """The plan in which one member of every group has so many 64ths of the sharded filters.

    Raises:
        PlanError: the groups have several sizes.
    """
    if len({times.plan.layers[name].group_size for name in times.cuts.units}) > 1:
        raise PlanError("memory is shared out over groups of one size, and the plan has several")
    shares = _one_has(member, units, UNITS, times.group_size)
    sizes = {name: apportion(n, shares) for name, n in times.cuts.units.items()}
    return times.cuts.with_sizes(sizes, times.plan.world_size)


Split = Literal["rows", "filters"]
SPLITS: tuple[Split, ...] = ("rows", "filters")
_NAMED = 3
Most = Sequence[int | None]


@dataclass(frozen=True)
class Shared:
    """The result of a division.

    Attributes:
        plan: the plan with the shares.
        partition: the division of rows, or of 64ths of all filters.
        by_layer: the division of each sharded block, by its leader; empty where one share holds for
            all.
        besides_s: the seconds that the shares do not divide.
    """

    plan: Plan
    partition: Partition
    by_layer: Mapping[str, Partition]
    besides_s: float

    def without(self) -> list[str]:
        """Notes on ranks that were given nothing."""
        notes = []
        for rank, units in enumerate(self.partition.sizes):
            if units == 0 and not self.by_layer:
                notes.append(f"rank {rank} is left out")
        for rank in range(len(self.partition.sizes) if self.by_layer else 0):
            none = [
                name
                for name, part in self.by_layer.items()
                if part.sizes[rank % len(part.sizes)] == 0
            ]
            if none:
                more = f", ... {len(none) - _NAMED} more" if len(none) > _NAMED else ""
                notes.append(f"rank {rank} has none of {', '.join(none[:_NAMED])}{more}")
        return notes


@dataclass(frozen=True)
class Sharing:
    """The division to find; the fields are the arguments of `balanced`, and its layers' times."""

    times: PlanTimes
    split: Split
    per_layer: bool
    least: int
    most: Most | None
    limits: tuple[int, ...] | None
    overheads_s: Sequence[float] | None
    grain: int

    def found(self) -> Shared:
        """Finds the shares.

        Raises:
            PlanError: the bounds allow no division.
        """
        times, world = self.times, self.times.plan.world_size
        batch = times.experiment.batch_size
        if self.split == "rows":
            rows = self._shared(
                "rows", batch, times.rows(), times.besides_rows(), self._most_rows, self.least
            )
            each = self._each(rows.sizes)
            plan = times.plan
            if each:
                plan = times.cuts.with_sizes(_sizes(each), world)
            return Shared(plan.with_rows(rows.sizes), rows, each, self._besides_s(rows.sizes))
        self._require_filters()
        equal = times.plan.rows_of(batch)
        besides = times.besides_parts(equal, times.cuts.units)
        parts = self._shared(
            "filters", UNITS, times.parts(equal), besides, self._most_parts(equal), self.least
        )
        each = self._each(equal)
        if each:
            plan = times.cuts.with_sizes(_sizes(each), world)
        else:
            plan = Plan.filters(times.plan.graph, world, parts.sizes, grain=self.grain)
        plan = plan.with_batch_norm(times.plan.batch_norm).with_rows(parts.sizes)
        return Shared(plan, parts, each, self._besides_s(plan.rows_of(batch)))

    def equal_s(self) -> float:
        """Seconds of computation with equal shares."""
        times = self.times
        batch, world = times.experiment.batch_size, times.plan.world_size
        rows = Plan.data_parallel(times.plan.graph, world).rows_of(batch)
        total = self._besides_s(rows)
        if self.split == "rows":
            total += _slowest(times.rows(), rows, times.besides_rows())
        elif not self.per_layer:
            besides = times.besides_parts(rows, times.cuts.units)
            total += _slowest(times.parts(rows), apportion(UNITS, (1,) * world), besides)
        if self.per_layer:
            total += self._cuts_s(rows, None)
        return total

    def _each(self, rows: tuple[int, ...]) -> dict[str, Partition]:
        """The division of every sharded block, if each gets shares of its own."""
        if not self.per_layer:
            return {}
        times, bounds = self.times, self._most_parts(rows)
        least = self.least if self.split == "filters" else 0
        found = {}
        for name, units in times.cuts.units.items():
            most = (
                None
                if bounds is None
                else [None if b is None else b * units // UNITS for b in bounds]
            )
            models, grain = times.of_leader(name, rows), times.cuts.grain(name, self.grain)
            what, besides = f"filters of layer {name!r}", times.besides_parts(rows, [name])
            found[name] = self._shared(what, units, models, besides, most, least, grain)
        return found

    def _shared(
        self,
        what: str,
        total: int,
        models: Sequence[TimeModel],
        besides_s: Sequence[float],
        most: Most | None,
        least: int,
        grain: int = 1,
    ) -> Partition:
        try:
            return partition(
                total,
                models,
                least=least,
                most=most,
                grain=grain,
                overheads_s=self.overheads_s,
                besides_s=besides_s,
            )
        except ValueError as error:
            raise PlanError(f"no {what} can be shared out like this: {error}") from error

    @cached_property
    def _most_rows(self) -> Most | None:
        if self.limits is None:
            return self.most
        return _tighter(self.most, most_rows(self.times.experiment, self.limits, self.times))

    def _most_parts(self, rows: tuple[int, ...]) -> Most | None:
        own = self.most if self.split == "filters" else None
        if self.limits is None or not self.times.cuts.units:
            return own
        return _tighter(own, most_parts(self.times.experiment, self.limits, self.times, rows))

    def _besides_s(self, rows: tuple[int, ...]) -> float:
        times = self.times
        total = max(times.besides_parts(rows, [None]))
        if self.split == "filters":
            total += _slowest(times.rows(), rows, times.besides_rows())
        elif not self.per_layer:
            total += self._cuts_s(rows, times.plan)
        return total

    def _cuts_s(self, rows: tuple[int, ...], plan: Plan | None) -> float:
        """Seconds of all sharded blocks, with a plan's shares or equal ones."""
        times, total = self.times, 0.0
        for name, units in times.cuts.units.items():
            choice = times.plan.layers[name]
            shares = None if plan is None else plan.layers[name].shares
            sizes = apportion(units, shares or (1,) * choice.group_size)
            besides = times.besides_parts(rows, [name])
            total += _slowest(times.of_leader(name, rows), sizes, besides)
        return total

    def _require_filters(self) -> None:
        """Checks that every rank can get filters of every layer.

        Raises:
            PlanError: a layer has too few; the text names it, its filters and what is valid.
        """
        k = self.times.group_size
        for name, units in self.times.cuts.units.items():
            if self.least > 0 and units < k:
                raise PlanError(
                    f"layer {name!r} has {units} filters for {k} ranks, so that not every one can "
                    f"have some; valid are least=0, which leaves ranks without, and at most "
                    f"{units} ranks"
                )


def _sizes(each: Mapping[str, Partition]) -> Sizes:
    return {name: part.sizes for name, part in each.items()}


def _slowest(
    models: Sequence[TimeModel], sizes: Sequence[int], besides_s: Sequence[float]
) -> float:
    each = zip(models, sizes, besides_s, strict=True)
    return max(float(model.seconds(size)[size]) + besides for model, size, besides in each)


def _tighter(one: Most | None, other: Sequence[int]) -> Most:
    if one is None:
        return other
    return [b if a is None else min(a, b) for a, b in zip(one, other, strict=True)]
