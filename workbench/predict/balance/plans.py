"""Plans whose shares let all devices of a machine finish together.

    rows        a device's rows by its time for the layers computed row by row
    filters     one share for all layers, by its time for all of them
    per layer   a share for each block, by its time for the layers of its shapes: ranks synchronise
                after each, and a device that is fast at large convolutions may be slow at others

Speed and memory are separate: times choose the shares, memory bounds them (`sharing.py`).

A rank without a share still takes part in every collective, and computes the replicated layers. So
where devices differ, plans over the first 1, 2, ... of them are considered as well, and the one
with the shortest predicted step is chosen, communication included.

Only a plan over fewer ranks leaves a device out, and it has the first ones: so slow devices are
left out where they come last. Equal neighbours are left out together or not at all.

Source: ours; that a device which costs more than it helps gets nothing is FuPerMod's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.question import experiment_of, required_machine, required_plan
from workbench.plan.io.errors import ExperimentError, MachineError, PlanError
from workbench.plan.io.html import Markup, element, frame_of, save, table
from workbench.plan.io.units import milliseconds
from workbench.plan.machine.device import Device
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan
from workbench.predict.balance.sharing import (
    SPLITS,
    Limit,
    PlanTimes,
    Shared,
    Sharing,
    Split,
    limits_of,
)
from workbench.predict.balance.time_model import Partition
from workbench.predict.prediction import predict

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Balanced:
    """A plan in which unequal devices finish their computation together, by a machine's times.

    Attributes:
        plan: the plan, with shares of rows, of filters, or of both; over the first few ranks only,
            where a step is faster without the others.
        split: the work that is divided: "rows" or "filters".
        partition: the units of each device, and its seconds of computation in a step: rows, or
            64ths of the filters where one share holds for all layers.
        by_layer: the filters of each member of a group, for each layer whose shares others follow,
            and its seconds for all of these layers; empty where one share holds for all.
        besides_s: the seconds of computation that these shares do not divide.
        equal_s: the seconds of the slowest device with equal shares.
        alone_s: the seconds of each device for all of the work [devices].
        notes: remarks on the measurements, and on devices that were left out.
    """

    plan: Plan
    split: Split
    partition: Partition
    equal_s: float
    alone_s: tuple[float, ...]
    by_layer: Mapping[str, Partition] = field(default_factory=dict)
    besides_s: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def end_s(self) -> float:
        """Seconds of computation in a step, each sharded block ended by its slowest device."""
        shared_out = sum(part.end_s for part in self.by_layer.values())
        if self.split == "rows" or not self.by_layer:
            shared_out += self.partition.end_s
        return self.besides_s + shared_out

    @property
    def gain_over_equal(self) -> float:
        """The speed-up over equal shares, for computation alone."""
        return self.equal_s / self.end_s

    @property
    def gain_over_fastest_alone(self) -> float:
        """The speed-up over the fastest device by itself, for computation alone."""
        return min(self.alone_s) / self.end_s

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each device: its units and seconds, here and with all of the work."""
        sizes, seconds = self.partition.sizes, self.partition.seconds
        rows = (
            {
                "rank": rank,
                self.split: sizes[rank] if rank < len(sizes) else 0,
                "seconds": seconds[rank] if rank < len(sizes) else 0.0,
                "alone_s": alone,
            }
            for rank, alone in enumerate(self.alone_s)
        )
        return frame_of(rows, ("rank", self.split, "seconds", "alone_s"))

    def save(self, path: str | Path) -> None:
        """Writes its table into a file: "x.html" or "x.csv".

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path)

    def _repr_html_(self) -> Markup:
        rows = (
            (str(rank), str(units), milliseconds(seconds), milliseconds(alone))
            for rank, units, seconds, alone in self.to_frame().itertuples(index=False)
        )
        head = ("rank", self.split, "computes", "all of it alone")
        return element("div", element("p", repr(self).strip("<>")), table(head, rows))

    def __repr__(self) -> str:
        sizes = ":".join(map(str, self.partition.sizes))
        each = f", {len(self.by_layer)} cuts by their own times" if self.by_layer else ""
        said = "".join(f"; {note}" for note in self.notes)
        return (
            f"<Balanced {self.plan.graph.source.name}: {self.split} {sizes}{each}, "
            f"{self.gain_over_equal:.2f} x equal shares, "
            f"{self.gain_over_fastest_alone:.2f} x the fastest alone{said}>"
        )


def balanced(
    plan: Plan | Experiment,
    machine: Machine,
    experiment: Experiment | None = None,
    *,
    split: Split = "rows",
    per_layer: bool = False,
    least: int = 0,
    most: Sequence[int | None] | None = None,
    memory_limit: Limit | None = None,
    overheads_s: Sequence[float] | None = None,
    grain: int = 8,
    last_good: Machine | None = None,
) -> Balanced:
    """Divides work over the devices of a machine, by the times of the model's layers on each.

    Args:
        plan: the plan, or an experiment, whose own plan is meant; with "rows" it is kept, and gets
            other rows; with "filters" it is made anew over all ranks.
        machine: the machine, with one device for each rank.
        experiment: the experiment that runs it, whose batch is divided; its own plan is replaced by
            `plan`. None: a step of momentum SGD with 32 samples for each rank.
        split: the work that is divided: "rows" of a batch, or the "filters" of every layer.
        per_layer: whether each sharded block of the plan gets shares of its own, by the times of
            its layers' shapes; with "rows" those of the plan's sharded layers, besides the rows.
        least: the least units of every device (rows, 64ths of the filters, or of each block's own
            filters); 0: it may get nothing, and the last, slowest ones may be left out of the plan,
            which then is over fewer ranks.
        most: the most units of each device (rows, or 64ths of the filters) [devices]; None: any
            number.
        memory_limit: the bytes of a rank, or of each, as numbers or text such as "2GiB"; None:
            memory is ignored.
        overheads_s: the seconds of communication where 1, 2, ... devices are used, instead of what
            the machine's links say [devices]: devices that cost more than they help get nothing.
            Not with `per_layer`.
        grain: the filters that stay together.
        last_good: an earlier measurement of the machine, whose times count for devices whose timing
            does not converge in `machine`.

    Raises:
        MachineError: no machine, or one that has no device for some rank.
        ExperimentError: no experiment, or one that cannot run this plan; or two.
        PlanError: no plan, an unknown split, bounds that allow no division, or too few filters in a
            layer for `least`; the text names the layer.

    Source: Moreno-Alvarez et al. 2020 and 2021, with functional performance models.
    """
    given = required_plan("balanced", plan)
    machine = required_machine("balanced", machine)
    step, world = experiment_of("balanced", plan, given, experiment), given.world_size
    devices, notes = trusted(machine, last_good, world, step.precision)
    if split not in SPLITS:
        raise PlanError(f"there is no split {split!r}; 'rows' and 'filters' are valid")
    if per_layer and overheads_s is not None:
        raise PlanError("overheads_s bounds one share for all layers, and not per_layer ones")
    bounds = None if memory_limit is None else limits_of(memory_limit, world)

    def sharing(ranks: int) -> Sharing:
        """The division over the first ranks."""
        over = given
        if ranks < world:
            over = over.with_rows(None).with_world_size(ranks)
        if split == "filters":
            over = Plan.filters(over.graph, ranks, grain=grain).with_batch_norm(over.batch_norm)
        own = step.replace(plan=over)
        times = PlanTimes(own, over, devices[:ranks])
        limits = None if bounds is None else bounds[:ranks]
        own_most = None if most is None else most[:ranks]
        return Sharing(times, split, per_layer, least, own_most, limits, overheads_s, grain)

    everybody = sharing(world)
    if least == 0 and overheads_s is None:
        found, said = quickest(everybody, sharing, machine)
    else:
        found, said = everybody.found(), ()
    return Balanced(
        found.plan,
        split,
        found.partition,
        everybody.equal_s(),
        everybody.times.alone(),
        found.by_layer,
        found.besides_s,
        (*notes, *said, *found.without()),
    )


def quickest(
    whole: Sharing, fewer: Callable[[int], Sharing], machine: Machine
) -> tuple[Shared, tuple[str, ...]]:
    """(the division over the ranks with the shortest step, notes on the ranks left out).

    Args:
        whole: the division that is asked for, over all ranks.
        fewer: a function that gives the same division over so many of the first ranks.
        machine: the machine, with its links.

    Raises:
        PlanError: the work cannot be divided over all ranks.
    """
    devices, best = whole.times.devices, whole.found()
    world = len(devices)
    if not (counts := _counts(whole)):
        return best, ()
    least_s = everybody_s = _step_s(whole, best, machine)
    for count in counts:
        try:
            sharing = fewer(count)
            found = sharing.found()
            step_s = _step_s(sharing, found, machine)
        except (PlanError, ExperimentError, MachineError):
            continue  # it has no room there, or cannot run so
        if step_s < least_s:
            best, least_s = found, step_s
    if (used := best.plan.world_size) == world:
        return best, ()
    named = f"rank {used} is" if used == world - 1 else f"ranks {used} to {world - 1} are"
    return best, (
        f"{named} left out: a step is predicted to take {least_s:.3g} s without, and "
        f"{everybody_s:.3g} s with",
    )


def _counts(whole: Sharing) -> list[int]:
    """Numbers of first ranks that a slower device follows, where a plan over fewer is possible."""
    plan, devices = whole.times.plan, whole.times.devices
    if whole.split == "rows" and any(own.group_size > 1 for own in plan.layers.values()):
        return []
    alone = whole.times.alone()
    return [
        n
        for n in range(1, len(devices))
        if devices[n] != devices[n - 1] and alone[n] > alone[n - 1]
    ]


def _step_s(sharing: Sharing, found: Shared, machine: Machine) -> float:
    """Seconds of a step, communication and waiting included."""
    devices: Sequence[Device] = sharing.times.devices
    own = machine.replace(devices=tuple(devices))
    return predict(found.plan, own, sharing.times.experiment).step_time


TRUSTED = 0.25
"""Relative half width of the 95 % band of a device's times up to which they are believed."""


def spread(device: Device, precision: str) -> float:
    """The relative half width of a device's error bands, weighted by its samples' seconds.

    0 for a device on which no layer was measured.
    """
    samples = [sample for sample in device.samples if sample.precision == precision]
    seconds = [sample.forward_s + sample.backward_s for sample in samples]
    errors = [sample.error * own for sample, own in zip(samples, seconds, strict=True)]
    return sum(errors) / sum(seconds) if sum(seconds) > 0 else 0.0


def trusted(
    machine: Machine, last_good: Machine | None, ranks: int, precision: str
) -> tuple[list[Device], tuple[str, ...]]:
    """(the device of each rank, notes on devices whose timing did not converge).

    Args:
        machine: the machine as measured now.
        last_good: the machine as measured before, for devices that did not converge now.
        ranks: the number of ranks.
        precision: the precision of the computation.

    Raises:
        MachineError: a machine has devices for another number of ranks.
    """
    for each in (machine, *((last_good,) if last_good is not None else ())):
        if len(each.devices) not in (1, ranks):
            raise MachineError(
                f"machine {each.name!r} has {len(each.devices)} devices, the plan {ranks} ranks"
            )
    devices, notes = list[Device](), list[str]()
    for rank in range(ranks):
        device = machine.device(rank)
        now = spread(device, precision)
        if now > TRUSTED:
            before = None if last_good is None else last_good.device(rank)
            kept = before is not None and spread(before, precision) <= TRUSTED
            notes.append(_said(rank, device, now, kept))
            device = before if kept and before is not None else device
        devices.append(device)
    return devices, tuple(notes)


def _said(rank: int, device: Device, now: float, kept: bool) -> str:
    used = "its last good times are used" if kept else "its times are used as they are"
    return (
        f"the timing of rank {rank} ({device.name}) did not converge: +- {now:.0%}, "
        f"{TRUSTED:.0%} is believed; {used}"
    )
