"""What `Cluster.calibrate` measures, and how it becomes a machine."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from workbench.client.assistant import Assistant
from workbench.client.calibration import cache
from workbench.client.calibration.devices import devices_of, extended, missing
from workbench.client.calibration.links import links_of, slowdown_of
from workbench.client.calibration.spread import Behind, stretches_of, unequal
from workbench.client.leases import Dispatch
from workbench.plan.experiment import SGD, Adam, AdamW, Experiment, Synthetic
from workbench.plan.graph import Graph, Layer, Source, Weight
from workbench.plan.machine import Machine
from workbench.plan.mesh import group_sizes
from workbench.plan.plan import Plan
from workbench.store import message
from workbench.store.device import Device

# Updates shall take as long as others do, and move nothing.
STILL = SGD(lr=1e-9, momentum=0.9)
_OF_DEVICES, _OF_LINKS = 0.1, 0.25  # of the time
_MEASURED = 0.7  # of a plan's time; the rest goes to starting its ranks


def plans_of(what: Sequence[Graph | Plan], world_size: int) -> tuple[Plan, ...]:
    """The plans to measure: those given, and for a graph data parallel and every hybrid one.

    Of a plan that recomputes layers or runs its tail in rounds, layers are measured once each,
    on all of their rows.

    Raises:
        TypeError: something else was given.
        ValueError: plans for different numbers of ranks.
    """
    plans: list[Plan] = []
    for given in what:
        if isinstance(given, Graph):
            plans.append(Plan.data_parallel(given, world_size))
            plans += [Plan.hybrid(given, world_size, k) for k in group_sizes(world_size)[:0:-1]]
        elif isinstance(given, Plan):
            plans.append(given.with_rounds("BK").with_recompute("*", recompute=False))
        else:
            raise TypeError(f"calibrate takes graphs and plans, got {type(given).__name__}")
    sizes = sorted({plan.world_size for plan in plans})
    if len(sizes) > 1:
        raise ValueError(f"plans for {sizes} ranks: a machine is measured for one number of ranks")
    return tuple(dict.fromkeys(plans)) or (Plan.data_parallel(_NOTHING, world_size),)


def rows_of(rows: int | Sequence[int]) -> tuple[int, ...]:
    """The numbers of rows to measure at, ascending.

    Raises:
        ValueError: there is none, or one that is no positive integer.
    """
    counts = (rows,) if isinstance(rows, int) else tuple(rows)
    if not counts or not all(
        isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts
    ):
        raise ValueError(f"rows must be one or more positive integers, got {rows!r}")
    return tuple(sorted(set(counts)))


# Engines take an experiment also where devices and links alone are measured.
_NOTHING = Graph(
    source=Source("module", "nothing"),
    input_shape=(1,),
    num_classes=1,
    layers=(
        Layer("one", "linear", ("input",), (1,), (1,), weights=(Weight("one.weight", (1, 1)),)),
    ),
    outputs=("one",),
)


@dataclass(frozen=True)
class CalibrationSpec:
    """What to measure besides the plans' layers.

    Attributes:
        rows: of each rank, ascending.
        precision: of the layers.
        optimizer: whose updates are measured; None: SGD with momentum.
        data: that is loaded; None: synthetic.
        within_s: about how long all of it may take.
    """

    rows: tuple[int, ...]
    precision: Literal["fp32", "bf16", "fp64"]
    optimizer: SGD | Adam | AdamW | None
    data: Any
    within_s: float

    def experiment(self, plan: Plan) -> Experiment:
        """What the ranks are given."""
        optimizer = STILL if self.optimizer is None else self.optimizer
        size = max(self.rows) * plan.world_size
        classes = max(2, plan.graph.num_classes)
        return Experiment(
            plan=plan,
            data=Synthetic(samples=size, classes=classes) if self.data is None else self.data,
            batch_size=size,
            optimizer=optimizer.model_copy(update={"lr": STILL.lr}),
            steps=1,
            precision=self.precision,
        )


class Calibration:
    """One calibration: what is known already is kept, what is missing is measured.

    Args:
        places: the engine of each rank, taken for this.
        devices: of each rank.
        hosts: emulated ones, or None.
        assistant: makes the initial weights.
        dispatch: starts the ranks.

    Raises:
        ValueError: hosts with different numbers of ranks.
    """

    def __init__(
        self,
        places: Sequence[int],
        devices: Sequence[Device],
        hosts: object,
        assistant: Assistant,
        dispatch: Dispatch,
    ) -> None:
        self.places, self.devices = places, devices
        self.assistant, self.dispatch = assistant, dispatch
        self.hosts = [device.host for device in devices]
        self.ranks_per_host = _per_host(self.hosts)
        self.name = cache.fingerprint(devices, hosts)
        self._stretches: list[Behind] = []

    def carry_out(
        self,
        plans: Sequence[Plan],
        wish: CalibrationSpec,
        module: nn.Module | None,
        *,
        fresh: bool,
        machine: Machine | None = None,
        keep: bool = True,
    ) -> Machine:
        """Measures what is missing; each finding is kept on disk at once.

        Args:
            plans: whose layers are measured.
            wish: what else.
            module: whose layers they are.
            fresh: forget what is kept.
            machine: to complete, instead of what is kept.
            keep: whether to look for what is kept, and to keep what is found.

        Raises:
            ModelError: `module` is missing, or is another one than was traced.
            RunError: a rank failed.
        """
        end = time.perf_counter() + wish.within_s
        self._stretches = []
        if machine is None and keep and not fresh:
            machine = cache.kept(self.name)
        print(f"calibrating {len(self.places)} engines:", end="", flush=True)
        try:
            if machine is None:
                machine = self._bare(wish.experiment(plans[0]), wish.within_s)
                if keep:
                    cache.keep(self.name, machine)
            open_ = [plan for plan in plans if plan.graph is not _NOTHING]
            for index, plan in enumerate(open_):
                left = max(0.0, end - time.perf_counter()) / (len(open_) - index)
                more = self._with(machine, plan, wish, module, left * _MEASURED)
                if keep and more is not machine:
                    cache.keep(self.name, more)
                machine = more
        finally:
            print(flush=True)
        return machine

    def _bare(self, experiment: Experiment, within_s: float) -> Machine:
        """The devices' own figures, and the links."""
        packed = message.pack(experiment)
        with _told("devices"):
            own_s = _OF_DEVICES * within_s
            figures = self._on_ranks("device:device", packed, within_s=own_s)
        with _told("links"):
            own_s = _OF_LINKS * within_s
            found = self._on_ranks("links:links", packed, within_s=own_s)
        within, across = links_of(found, self.hosts)
        return Machine(
            name=f"{len(self.places)} engines on {', '.join(dict.fromkeys(self.hosts))}",
            devices=devices_of(figures, self.devices),
            within=within,
            across=across,
            ranks_per_host=None if across is None else self.ranks_per_host,
            slowdown=slowdown_of(found),
        )

    def _with(
        self,
        machine: Machine,
        plan: Plan,
        wish: CalibrationSpec,
        module: nn.Module | None,
        within_s: float,
    ) -> Machine:
        """The machine with a plan's layers, measured unless it has them."""
        experiment = wish.experiment(plan)
        rows = missing(machine.devices, experiment, wish.rows)
        if not rows:
            return machine
        packed = message.pack(experiment)
        with _told(f"{_named(plan)} x {'/'.join(map(str, rows))} rows"):
            weights = self.assistant.values_of(experiment, module) or self.assistant.weights(packed)
            found = self._on_ranks(
                "layers:layers", packed, weights=weights, rows=rows, within_s=within_s
            )
        devices = extended(machine.devices, experiment, found)
        own_devices = len(devices) > 1
        self._stretches += stretches_of(experiment, found, own_devices=own_devices)
        return unequal(machine, self._stretches).replace(devices=devices)

    def _on_ranks(self, task: str, packed: bytes, **shared: Any) -> list[Any]:
        return self.dispatch.called(f"workbench.train.measure.{task}", packed, self.places, shared)


def _per_host(hosts: Sequence[str]) -> int:
    """How many ranks each host has, neighbours together.

    Raises:
        ValueError: not all have the same number.
    """
    counts = {hosts.count(host) for host in hosts}
    if len(counts) > 1:
        raise ValueError(
            f"hosts have {' and '.join(map(str, sorted(counts)))} ranks, but a machine has the "
            "same number on every host"
        )
    return counts.pop()


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Says what is measured, then how long it took."""
    began = time.perf_counter()
    print(f" {what}", end="", flush=True)
    yield
    print(f" ({time.perf_counter() - began:.1f} s)", end="", flush=True)


def _named(plan: Plan) -> str:
    cut = {choice.group_size for choice in plan.layers.values() if choice.group_size > 1}
    how = f"cut over {'/'.join(map(str, sorted(cut)))}" if cut else "data parallel"
    return f"{plan.graph.source.name} {how}"
