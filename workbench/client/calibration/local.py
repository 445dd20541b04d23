"""What `Machine.local` measures in this process, without engines: one device, and workspaces.

It computes on as many threads as an engine of a cluster on this host would have.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch

from workbench.client.calibration.cache import processor
from workbench.client.calibration.calibrate import rows_of
from workbench.client.calibration.devices import with_workspaces
from workbench.hosts.host import assign, probe
from workbench.plan.graph.graph import Graph
from workbench.plan.machine.device import Device, Link, Precision
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan
from workbench.store.cluster_spec import EngineDevice
from workbench.train.measure.device import DTYPES, SIDE, library_bytes, workspaces_of
from workbench.train.measure.repeating import finish

_COPIED_BYTES, _CALLS, _TIMES = 2**26, 200, 3
_LATENCY_S = 1e-5


def local_machine(
    what: Sequence[Graph | Plan], rows: int | Sequence[int], precision: Precision
) -> Machine:
    """Measures this host's device, and on it the workspaces of plans.

    Raises:
        TypeError: something else than graphs and plans.
        ValueError: there are no rows.
    """
    counts, plans = rows_of(rows), list(map(_plan, what))
    host = probe()
    engines = max((plan.world_size for plan in plans), default=len(host.cores))
    place = assign(engines, host)[0]
    device = torch.device(place.kind)
    with _on_threads(place.threads):
        machine = Machine(
            name=f"this process on {host.name}",
            devices=(_device(place, device, engines),),
            within=_link(device),
        )
        for plan in plans:
            ranks = range(plan.world_size)
            found = workspaces_of(plan, ranks, counts, precision, device)
            machine = machine.replace(devices=with_workspaces(machine.devices, [found]))
    return machine


def _plan(what: Graph | Plan) -> Plan:
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


def _device(place: EngineDevice, device: torch.device, engines: int) -> Device:
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


def _link(device: torch.device) -> Link:
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
