"""How long each device takes for its rows, and for its part of every cut, at several sizes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from workbench.plan.device import Device
from workbench.plan.experiment import Experiment
from workbench.plan.graph import Layer
from workbench.plan.layout import ROWS
from workbench.plan.placement import apportion
from workbench.plan.plan import Plan
from workbench.plan.work import work_of
from workbench.predict.balance.cuts import Cuts
from workbench.predict.balance.time_model import Point, TimeModel
from workbench.predict.balance.time_tables import Kind

UNITS = 64  # into which a group's work is divided, where it is not divided by rows
_PARTS = (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class Times:
    """What the layers of a plan take on some devices.

    Attributes:
        experiment: its batch and precision.
        plan: of which layers are row by row, cut over groups, or the same on a whole group.
        devices: of each rank.
        kind: of the models.
    """

    experiment: Experiment
    plan: Plan
    devices: Sequence[Device]
    kind: Kind

    @cached_property
    def cuts(self) -> Cuts:
        """Of the plan."""
        return Cuts(self.plan)

    @cached_property
    def group_size(self) -> int:
        """Of the largest groups over which layers lie."""
        return max((c.group_size for c in self.plan.layers.values()), default=1)

    @cached_property
    def _by_rows(self) -> list[Layer]:
        flow = self.plan.flow
        return [
            layer
            for layer in self.plan.graph.layers
            if flow.inputs[layer.name] == flow.outputs[layer.name] == ROWS
        ]

    @cached_property
    def _alike(self) -> dict[str | None, list[Layer]]:
        """What every rank of a group does for all of the group's rows, by the cut that follows."""
        by_rows = {layer.name for layer in self._by_rows}
        found: dict[str | None, list[Layer]] = {}
        waiting: list[Layer] = []
        for layer in self.plan.graph.layers:
            if (leader := self.cuts.leader_of.get(layer.name)) is not None:
                found.setdefault(leader, []).extend(waiting)
                waiting = []
            elif layer.name not in by_rows:
                waiting.append(layer)
        return {**found, None: waiting}

    def rows(self) -> list[TimeModel]:
        """Of each rank, for rows of what is done row by row."""
        batch = self.experiment.batch_size
        sizes = sorted({max(1, batch // part) for part in _PARTS})
        return [
            TimeModel(
                tuple(Point(d, self._seconds(self._by_rows, device, self._one, d)) for d in sizes),
                self.kind,
            )
            for device in self.devices
        ]

    def besides_rows(self) -> list[float]:
        """Of each rank, whatever its rows: what a step costs besides, and updating its weights."""
        kind = self.experiment.optimizer.kind
        each = 8 if self.experiment.precision == "fp64" else 4
        stored = each * sum(layer.parameters for layer in self._by_rows)
        return [own.step_s + stored * own.update_s_per_byte.get(kind, 0.0) for own in self.devices]

    def besides_parts(self, rows: Sequence[int], leaders: Collection[str | None]) -> list[float]:
        """Of each member of a group, for what all of them do alike before these cuts.

        Ranks meet at the end of a cut, and not between what follows and the next cut.

        Args:
            rows: of each rank.
            leaders: of the cuts; None: what comes after the last one.
        """
        layers, found = self.plan.layers, [0.0] * len(rows)
        sizes = [layers[name].group_size for name in leaders if name is not None]
        k = max(sizes, default=self.group_size)
        for layer in (layer for leader in leaders for layer in self._alike.get(leader, ())):
            flow = self.plan.flow
            size = max(flow.inputs[layer.name].group_size, flow.outputs[layer.name].group_size)
            for rank, count in enumerate(_group_rows(rows, size)):
                found[rank] += self._seconds([layer], self.devices[rank], self._whole, count)
        return [max(found[member::k]) for member in range(k)]

    def alone(self) -> tuple[float, ...]:
        """Of each device, for the whole model and the whole batch."""
        layers, batch = self.plan.graph.layers, self.experiment.batch_size
        return tuple(self._seconds(layers, own, self._one, batch) for own in self.devices)

    def parts(self, rows: Sequence[int]) -> list[TimeModel]:
        """Of each member of a group, for 64ths of all that is cut; of several groups the slowest.

        Args:
            rows: of each rank.
        """
        layers = [layer for layer in self.plan.graph.layers if layer.name in self.cuts.leader_of]
        sizes = [(units, units) for units in self._pieces]
        return self._members(layers, rows, sizes, self.group_size)

    def of_leader(self, leader: str, rows: Sequence[int]) -> list[TimeModel]:
        """The same for a leader's own filters, and the layers that are cut as it is."""
        graph, of = self.plan.graph, self.cuts.leader_of
        layers = [layer for layer in graph.layers if of.get(layer.name) == leader]
        sizes = {sizes[leader][0]: units for units, (_, sizes) in self._pieces.items()}
        points = [(units, d) for d, units in sizes.items() if d]
        return self._members(layers, rows, points, self.plan.layers[leader].group_size)

    def _members(
        self,
        layers: Sequence[Layer],
        rows: Sequence[int],
        sizes: Sequence[tuple[int, int]],
        k: int,
    ) -> list[TimeModel]:
        """Models with a point for each (64ths, units), of each member of groups of k."""
        every = _group_rows(rows, k)
        return [
            TimeModel(
                tuple(
                    Point(
                        d,
                        max(
                            self._seconds(layers, self.devices[r], self._pieces[units][0], every[r])
                            for r in range(member, len(self.devices), k)
                        ),
                    )
                    for units, d in sizes
                ),
                self.kind,
            )
            for member in range(k)
        ]

    @property
    def _whole(self) -> Plan:
        """A plan of which the first rank has all of every cut."""
        return self._pieces[UNITS][0]

    @cached_property
    def _one(self) -> Plan:
        return Plan.data_parallel(self.plan.graph, 1)

    @cached_property
    def _pieces(self) -> dict[int, tuple[Plan, dict[str, tuple[int, ...]]]]:
        """By 64ths: a plan over two ranks of which the first has so much, and its sizes."""
        found = {}
        for part in _PARTS:
            shares = (UNITS // part, UNITS - UNITS // part)
            sizes = {name: apportion(n, shares) for name, n in self.cuts.units.items()}
            found[UNITS // part] = self.cuts.with_sizes(sizes, 2, 2), sizes
        return found

    def _seconds(self, layers: Sequence[Layer], device: Device, plan: Plan, rows: int) -> float:
        """Of the first rank of a plan, forward and backward."""
        every = (rows, *(0 for _ in range(plan.world_size - 1)))
        total = 0.0
        for layer in layers:
            if layer.kind not in ("parameter", "size"):
                work = work_of(plan, layer, 0, every, self.experiment.precision)
                estimate = device.seconds(work)
                total += estimate.forward_s + estimate.backward_s
        return total


def _group_rows(rows: Sequence[int], k: int) -> list[int]:
    """Of each rank, the rows of its group of k."""
    return [sum(rows[rank - rank % k : rank - rank % k + k]) for rank in range(len(rows))]
