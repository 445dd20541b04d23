"""What `Cluster.calibrate` measures, and how it becomes a machine: devices, links, layers."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import nn

from workbench.client.calibration import cache
from workbench.client.calibration.cache import processor
from workbench.client.calibration.devices import (
    Behind,
    devices_of,
    extended,
    missing,
    stretches_of,
    unequal,
    unmeasured,
    with_workspaces,
)
from workbench.client.leases import Lease
from workbench.client.run.submitting import module_values
from workbench.hosts.host import assign, probe
from workbench.plan.experiment.experiment import SGD, AnyOptimizer, Experiment, Synthetic
from workbench.plan.graph.graph import Graph, Input, Layer, Source, Weight
from workbench.plan.machine.device import Curve, Device, Link, Precision, costs
from workbench.plan.machine.machine import Machine
from workbench.plan.placement.placement import group_sizes
from workbench.plan.plans.plan import Plan
from workbench.store.cluster_spec import EngineDevice
from workbench.train.measure.device import DTYPES, SIDE, library_bytes, workspaces_of
from workbench.train.measure.links import LinksMeasured, Timed
from workbench.train.measure.repeating import finish

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
    inputs=(Input((1,)),),
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
        rows: the numbers of rows of each rank, ascending.
        optimizer: the optimizer whose updates are measured; None: SGD with momentum.
        data: the data that is loaded; None: synthetic.
        within_s: about how long all of it may take, in seconds.
        module: a module with other values than the one that was traced; see `Cluster.train`.

    Raises:
        ValueError: there is no time.
    """

    rows: tuple[int, ...]
    precision: Precision
    optimizer: AnyOptimizer | None
    data: Any
    within_s: float
    module: nn.Module | None = None

    def __post_init__(self) -> None:
        if not 0 < self.within_s < float("inf"):
            raise ValueError(
                f"within_s must be a positive number of seconds, got {self.within_s!r}"
            )

    def experiment(self, plan: Plan) -> Experiment:
        """What the ranks are given."""
        optimizer = STILL if self.optimizer is None else self.optimizer
        size = max(self.rows) * plan.world_size
        classes = max(2, plan.graph.num_classes)
        return Experiment(
            plan=plan,
            data=Synthetic(samples=size, classes=classes) if self.data is None else self.data,
            batch_size=size,
            optimizer=optimizer.at_rate(STILL.lr),
            steps=1,
            precision=self.precision,
        )


class Calibration:
    """One calibration: what is known already is kept, what is missing is measured.

    Raises:
        ValueError: Hosts have different numbers of ranks.
    """

    def __init__(
        self, lease: Lease, devices: Sequence[EngineDevice], hosts: object, spec: CalibrationSpec
    ) -> None:
        self.lease, self.devices, self.spec = lease, devices, spec
        self.hosts = [device.host for device in devices]
        self.ranks_per_host = _per_host(self.hosts)
        self.name = cache.fingerprint(devices, hosts)
        self._stretches: list[Behind] = []

    def machine(
        self,
        plans: Sequence[Plan],
        *,
        fresh: bool = False,
        machine: Machine | None = None,
        keep: bool = True,
    ) -> Machine:
        """Measures what is missing; each finding is kept on disk at once.

        Args:
            fresh: whether to forget what is kept.
            machine: the machine to complete, instead of what is kept.
            keep: whether to look for what is kept, and to keep what is found.

        Raises:
            ModelError: the module is missing, or is another one than was traced.
            RunError: a rank failed.
        """
        end = time.perf_counter() + self.spec.within_s
        if machine is None and keep and not fresh:
            machine = cache.kept(self.name)
        print(f"calibrating {len(self.devices)} engines:", end="", flush=True)
        try:
            if machine is None:
                machine = self._bare(self.spec.experiment(plans[0]))
                if keep:
                    cache.keep(self.name, machine)
            open_ = [plan for plan in plans if plan.graph is not _NOTHING]
            for index, plan in enumerate(open_):
                left = max(0.0, end - time.perf_counter()) / (len(open_) - index)
                more = self._with(machine, plan, left * _MEASURED)
                if keep and more is not machine:
                    cache.keep(self.name, more)
                machine = more
        finally:
            print(flush=True)
        return machine

    def _bare(self, experiment: Experiment) -> Machine:
        """The devices' own figures, and the links."""
        within_s = self.spec.within_s
        with _told("devices"):
            figures = self._measure("device", experiment, within_s=_OF_DEVICES * within_s)
        with _told("links"):
            found = self._measure("links", experiment, within_s=_OF_LINKS * within_s)
        within, across = links_of(found, self.hosts)
        return Machine(
            name=f"{len(self.devices)} engines on {', '.join(dict.fromkeys(self.hosts))}",
            devices=devices_of(figures, self.devices),
            within=within,
            across=across,
            ranks_per_host=None if across is None else self.ranks_per_host,
            slowdown=slowdown_of(found),
        )

    def _with(self, machine: Machine, plan: Plan, within_s: float) -> Machine:
        """The machine with a plan's layers and workspaces, measured unless it has them."""
        experiment = self.spec.experiment(plan)
        if unmeasured(machine.devices, experiment, self.spec.rows):
            with _told(f"workspaces of {_named(plan)}"):
                beside = self._measure("workspaces", experiment, rows=self.spec.rows)
            machine = machine.replace(devices=with_workspaces(machine.devices, beside))
        rows = missing(machine.devices, experiment, self.spec.rows)
        if not rows:
            return machine
        with _told(f"{_named(plan)} x {'/'.join(map(str, rows))} rows"):
            weights = module_values(experiment, self.spec.module, self.lease.link.folder)
            found = self._measure(
                "layers", experiment, weights=weights, rows=rows, within_s=within_s
            )
        devices = extended(machine.devices, experiment, found)
        own_devices = len(devices) > 1
        self._stretches += stretches_of(experiment, found, own_devices=own_devices)
        return unequal(machine, self._stretches).replace(devices=devices)

    def _measure(self, task: str, experiment: Experiment, **shared: Any) -> list[Any]:
        return self.lease.call(task, experiment, shared)


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


_SLOWEST = 1e-15  # seconds for each byte, where none could be seen
# What ranks usually communicate by; getting new memory is no matter of the link.
_OF_THE_LINK = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def links_of(found: Sequence[LinksMeasured], hosts: Sequence[str]) -> tuple[Link, Link | None]:
    """(within a host, across hosts) from what each rank found; None: there is one host."""
    whole = Link(name="one rank", latency_s=0.0, bandwidth=1 / _SLOWEST)
    inside = _link("within a host", found, hosts, spans=False)
    if len(set(hosts)) == 1:
        return inside or whole, None
    across = _link("across hosts", found, hosts, spans=True)
    assert across is not None
    return inside or whole, across


def slowdown_of(found: Sequence[LinksMeasured]) -> float:
    """How much slower ranks compute beside a collective: the mean over ranks and groups."""
    every = [cost.slowdown for rank in found for cost in rank.overlap_costs.values()]
    return fmean(every) if every else 1.0


def _link(
    name: str, found: Sequence[LinksMeasured], hosts: Sequence[str], *, spans: bool
) -> Link | None:
    def chosen(ranks: tuple[int, ...]) -> bool:
        return (len({hosts[rank] for rank in ranks}) > 1) == spans

    timed = [t for rank in found for t in rank.collectives if chosen(t.ranks)]
    if not timed:
        return None
    plain = [t for t in timed if t.op in _OF_THE_LINK]
    terms = np.array([(t.rounds, t.received, t.added) for t in plain], dtype=float)
    latency, per_byte, added = costs(terms, np.array([t.seconds for t in plain])).tolist()
    busy = [
        cost.busy for rank in found for ranks, cost in rank.overlap_costs.items() if chosen(ranks)
    ]
    return Link(
        name=name,
        latency_s=latency,
        bandwidth=1 / max(per_byte, _SLOWEST),
        reduction_s_per_byte=added,
        busy=fmean(busy),
        curves=_curves(found, chosen),
        source="measured, all groups of a size at once",
    )


def _curves(
    found: Sequence[LinksMeasured], chosen: Callable[[tuple[int, ...]], bool]
) -> tuple[Curve, ...]:
    """For each collective and number of ranks, the mean over ranks at each size.

    Where a tensor cannot be cut equally, ranks receive different numbers of bytes at one size.
    """
    sizes: dict[tuple[str, int], dict[int, list[Timed]]] = {}
    for rank in found:
        seen: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for timed in rank.collectives:
            if chosen(timed.ranks):
                at = sizes.setdefault((timed.op, len(timed.ranks)), {})
                at.setdefault(seen[timed.op, timed.ranks], []).append(timed)
                seen[timed.op, timed.ranks] += 1
    return tuple(
        Curve(op=op, ranks=ranks, points=tuple(sorted(dict(map(_point, at.values())).items())))
        for (op, ranks), at in sizes.items()
    )


def _point(timed: Sequence[Timed]) -> tuple[float, float]:
    return fmean(each.received for each in timed), fmean(each.seconds for each in timed)


_COPIED_BYTES, _CALLS, _TIMES = 2**26, 200, 3
_LATENCY_S = 1e-5


def local_machine(
    what: Sequence[Graph | Plan], rows: int | Sequence[int], precision: Precision
) -> Machine:
    """Measures this host's device, and on it the workspaces of plans, without engines.

    It computes in this process, on as many threads as an engine of a cluster here would have.

    Raises:
        TypeError: something else than graphs and plans.
        ValueError: there are no rows.
    """
    counts, plans = rows_of(rows), list(map(_plan_of, what))
    host = probe()
    engines = max((plan.world_size for plan in plans), default=len(host.cores))
    place = assign(engines, host)[0]
    device = torch.device(place.kind)
    with _on_threads(place.threads):
        machine = Machine(
            name=f"this process on {host.name}",
            devices=(_own_device(place, device, engines),),
            within=_memory_link(device),
        )
        for plan in plans:
            ranks = range(plan.world_size)
            found = workspaces_of(plan, ranks, counts, precision, device)
            machine = machine.replace(devices=with_workspaces(machine.devices, [found]))
    return machine


def _plan_of(what: Graph | Plan) -> Plan:
    if isinstance(what, Graph):
        return Plan.data_parallel(what, 1)
    if isinstance(what, Plan):
        return what.with_rounds("BK").with_recompute("*", recompute=False)
    raise TypeError(f"Machine.local takes graphs and plans, got {type(what).__name__}")


@contextmanager
def _on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _own_device(place: EngineDevice, device: torch.device, engines: int) -> Device:
    cpu, side = place.kind == "cpu", SIDE[place.kind]
    flops = {}
    for name, dtype in DTYPES.items():
        a = torch.ones(side, side, dtype=dtype, device=device)
        flops[name] = 2.0 * side**3 / _seconds(partial(torch.mm, a, a), device)
    small = torch.ones(1, device=device)
    sharers = engines if cpu else place.sharers
    return Device(
        name=processor() if cpu else place.name,
        kind="cpu" if cpu else "cuda",
        memory_bytes=place.memory_bytes // sharers,
        bandwidth=_bandwidth(device),
        flops=flops,
        call_s=_seconds(lambda: [small.relu() for _ in range(_CALLS)], device) / _CALLS,
        sharers=1 if cpu else sharers,
        library_bytes=library_bytes(device),
        source="measured by one process alone",
    )


def _memory_link(device: torch.device) -> Link:
    """A guess: other ranks write into memory, this one reads it."""
    return Link(
        name="memory of this host",
        latency_s=_LATENCY_S,
        bandwidth=_bandwidth(torch.device("cpu")) / 2,
        reduction_s_per_byte=3 / _bandwidth(device),
        source="not measured: copies of one process alone, and an assumed latency",
    )


def _bandwidth(device: torch.device) -> float:
    source = torch.ones(_COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / _seconds(lambda: target.copy_(source), device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The median seconds of a call, after a first one."""
    taken = []
    for _ in range(1 + _TIMES):
        finish(device)
        began = time.perf_counter()
        call()
        finish(device)
        taken.append(time.perf_counter() - began)
    return median(taken[1:])
