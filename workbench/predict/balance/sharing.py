"""One way to share out a step's work: rows, one share of all filters, or a share for each cut."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from workbench.plan.errors import PlanError
from workbench.plan.placement import apportion
from workbench.plan.plan import Plan
from workbench.predict.balance.cuts import Sizes
from workbench.predict.balance.memory_bounds import most_parts, most_rows
from workbench.predict.balance.partition import Partition, partition
from workbench.predict.balance.time_model import TimeModel
from workbench.predict.balance.times import UNITS, Times

Split = Literal["rows", "filters"]
SPLITS: tuple[Split, ...] = ("rows", "filters")
_NAMED = 3
Most = Sequence[int | None]


@dataclass(frozen=True)
class Shared:
    """What was found.

    Attributes:
        plan: with the shares.
        partition: of rows, or of 64ths of all filters.
        by_layer: of each cut; nothing where one share is for all.
        besides_s: seconds that are not divided by them.
    """

    plan: Plan
    partition: Partition
    by_layer: Mapping[str, Partition]
    besides_s: float

    def without(self) -> list[str]:
        """What is to be said of ranks that were given nothing."""
        notes = []
        for rank, size in enumerate(self.partition.sizes):
            if size == 0 and not self.by_layer:
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
    """What is wanted; the fields are the arguments of `balanced`, and the times of its layers."""

    times: Times
    split: Split
    per_layer: bool
    least: int
    most: Most | None
    limits: tuple[int, ...] | None
    overheads_s: Sequence[float] | None
    grain: int

    def found(self) -> Shared:
        """The shares.

        Raises:
            PlanError: there is no such way.
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
        """Seconds with equal shares."""
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
        """Of every cut, if it gets shares of its own."""
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
        """Of all cuts, with a plan's shares or equal ones."""
        times, total = self.times, 0.0
        for name, units in times.cuts.units.items():
            choice = times.plan.layers[name]
            shares = None if plan is None else plan.layers[name].shares
            sizes = apportion(units, shares or (1,) * choice.group_size)
            besides = times.besides_parts(rows, [name])
            total += _slowest(times.of_leader(name, rows), sizes, besides)
        return total

    def _require_filters(self) -> None:
        """Refuses to give filters to every rank where there are fewer of them.

        Raises:
            PlanError: naming the layer, its filters and what is valid.
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
