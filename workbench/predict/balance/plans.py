"""Plans whose shares are those that a machine's devices end together with.

    rows        a device's rows by its time for what is done row by row
    filters     one share for all layers, by its time for all of them
    per layer   a share for each cut, by its time for the layers of this very shape: ranks meet
                after each, and a device that is fast at large convolutions may be slow at others

Speed and memory are apart: times choose shares, memory bounds them (`memory_bounds.py`).

A rank without a share still takes part in every collective, and does what all do alike. So where
devices differ, plans over the first 1, 2, ... of them are looked at as well, and that counts whose
step is predicted to be the shortest, communication included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from workbench.plan.errors import PlanError
from workbench.plan.experiment import Experiment
from workbench.plan.machine import Machine
from workbench.plan.plan import Plan
from workbench.predict.balance.leaving_out import quickest
from workbench.predict.balance.memory_bounds import Limit, limits_of
from workbench.predict.balance.partition import Partition
from workbench.predict.balance.sharing import SPLITS, Sharing, Split
from workbench.predict.balance.time_tables import Kind
from workbench.predict.balance.times import Times
from workbench.predict.balance.trust import trusted


@dataclass(frozen=True)
class Balanced:
    """A plan in which unequal devices end their computing together, as a machine says.

    Attributes:
        plan: with shares of rows, of filters, or of both; over fewer ranks, the first ones, where
            a step is faster without the others.
        split: what was shared out.
        partition: units of each device, and its seconds of computing in a step: rows, or 64ths
            of the filters where one share is for all layers.
        by_layer: for each layer whose shares others follow, filters of each member of a group,
            and its seconds for all of these layers; nothing where one share is for all.
        besides_s: seconds of computing that these shares do not divide.
        equal_s: of the slowest device, with equal shares.
        alone_s: of each device, with all of the work.
        notes: what should be known of the measurements, and of devices that were left out.
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
        """Seconds of computing in a step, each cut ended by the device that is last."""
        shared_out = sum(part.end_s for part in self.by_layer.values())
        if self.split == "rows" or not self.by_layer:
            shared_out += self.partition.end_s
        return self.besides_s + shared_out

    @property
    def gain_over_equal(self) -> float:
        """How many times faster than with equal shares, computing alone."""
        return self.equal_s / self.end_s

    @property
    def gain_over_fastest_alone(self) -> float:
        """How many times faster than the fastest device by itself, computing alone."""
        return min(self.alone_s) / self.end_s

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
    experiment: Experiment,
    machine: Machine,
    *,
    split: Split = "rows",
    per_layer: bool = False,
    kind: Kind = "linear",
    least: int = 0,
    most: Sequence[int | None] | None = None,
    memory_limit: Limit | None = None,
    overheads_s: Sequence[float] | None = None,
    grain: int = 8,
    last_good: Machine | None = None,
) -> Balanced:
    """Shares for the devices of a machine, from the times of the model's layers on each.

    Args:
        experiment: whose plan's model is trained, with this batch; of "rows" the plan is kept,
            and gets other rows; of "filters" it is made anew over all ranks.
        machine: with a device for each rank.
        split: what is shared out: the rows of a batch, or every layer's filters.
        per_layer: whether each cut of the plan gets shares of its own, by the times of its
            layers' shapes; of "rows" those of the plan's sharded layers, besides the rows.
        kind: what is believed between measured sizes.
        least: units of every device (rows, 64ths of the filters, or of each cut's own filters);
            0: it may get nothing, and the last, slowest ones may be left out of the plan, which
            then is over fewer ranks.
        most: units that each device may have (rows, or 64ths of the filters); None: any number.
        memory_limit: bytes of a rank, or of each, as numbers or text such as "2GiB"; None: memory
            is not looked at.
        overheads_s: seconds of communication where 1, 2, ... devices are used, instead of what the
            machine's links say: devices that cost more than they help get nothing. Not with
            `per_layer`.
        grain: of filters.
        last_good: a machine as it was measured before, whose times count for devices whose timing
            does not converge in `machine`.

    Raises:
        MachineError: a machine has no device for some rank.
        PlanError: no such split, bounds that leave no way to share out, or too few filters in a
            layer for `least`; the text names the layer.

    Source: Moreno-Alvarez et al. 2020 and 2021, with functional performance models.
    """
    world = experiment.plan.world_size
    devices, notes = trusted(machine, last_good, world, experiment.precision)
    if split not in SPLITS:
        raise PlanError(f"there is no split {split!r}; 'rows' and 'filters' are valid")
    if per_layer and overheads_s is not None:
        raise PlanError("overheads_s bounds one share for all layers, and not per_layer ones")
    bounds = None if memory_limit is None else limits_of(memory_limit, world)

    def sharing(ranks: int) -> Sharing:
        """Over the first ranks."""
        plan = experiment.plan
        if ranks < world:
            plan = plan.with_rows(None).with_world_size(ranks)
        if split == "filters":
            plan = Plan.filters(plan.graph, ranks, grain=grain).with_batch_norm(plan.batch_norm)
        own = experiment.replace(plan=plan)
        times = Times(own, plan, devices[:ranks], kind)
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
