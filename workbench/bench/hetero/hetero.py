"""Devices of unequal speed: measured shares, against equal ones and the fastest device alone.

    static     engines of three sets of speeds, rows and filters shared out (`static.py`)
    hosts      two emulated hosts of unequal speed, and rows shared out over both
    live       a device slows down during a run (`live.py`)
    re-cut     what it costs, against copies of the same bytes (`reshard.py`)
    partition  how long it takes to share out work over 64 devices

Source: Moreno-Alvarez et al. 2020 and 2021, and the gain model derived from them.
"""

import random
import time

from workbench.bench.hetero import live, reshard, static
from workbench.bench.hetero.static import Case, Found, Size
from workbench.bench.report import Figure, Report
from workbench.client.cluster import Cluster
from workbench.hosts.emulated.hosts import Hosts
from workbench.plan.machine.machine import Machine
from workbench.predict.balance import Point, TimeModel, partition
from workbench.predict.balance.time_model import KINDS
from workbench.store.errors import HostsError

SPEEDS = ((2, 1, 1), (4, 2, 1), (70, 25, 5))
HOST_SPEEDS, RANKS_PER_HOST, BANDWIDTH = (1.0, 0.5), 2, "2gbit"
# Shares of rows are fine-grained if there are many rows, those of filters if a layer has many.
ROWS = Case("rows", divisor=4, batch_size=240)
FILTERS = Case("filters", divisor=1, batch_size=16)
QUICK = (Case("rows", divisor=4, batch_size=48), Case("filters", divisor=4, batch_size=16))
RANKS = 4  # of the re-cut
SLOWDOWNS = 3
DEVICES, UNITS = 64, 1024


FULL = Size(SPEEDS, (ROWS, FILTERS), 2, 2, 6.0)
SMALL = Size(((2, 1),), QUICK, 1, 2, 2.0)


def run(*, quick: bool) -> Report:
    """Measures all parts; `quick` without hosts, small and on few engines."""
    size = SMALL if quick else FULL
    found: list[Found] = []
    with Cluster(len(size.speeds[0]), timeout=300.0) as cluster:
        bare: Machine | None = None
        for speeds in size.speeds:
            for engine, speed in enumerate(speeds):
                cluster.slow(engine, max(speeds) / speed)
            try:
                if bare is None:  # for all speeds: at a twentieth's it would take minutes
                    measured = cluster.calibrate(within_s=size.within_s, keep=False)
                    bare = _each_its_own(measured, len(cluster))
                for case in size.cases:
                    found.append(static.compared(cluster, speeds, case, size, bare))
            finally:
                cluster.mend()
        slowdowns = 1 if quick else SLOWDOWNS
        found.append(live.run(cluster, size.cases[0], rounds=slowdowns, quick=quick))
        if quick:
            found.append(reshard.run(cluster, "", rounds=1))
    if not quick:
        found.append(_on_hosts(size))
        with Cluster(RANKS, timeout=300.0) as cluster:
            found.append(reshard.run(cluster, "vgg11", rounds=3))
    found.append(_partitioned())
    notes = (
        "An engine of speed v is held for max(v) / v - 1 times the processor time that it takes. "
        "Layers are measured under each set of speeds, devices' own figures and links under the "
        "first. " + "; ".join(map(str, size.cases)),
        f"Medians and ranges of {size.rounds} interleaved rounds of {size.steps} steps.",
    )
    return Report(
        "hetero",
        tuple(row for part in found for row in part.rows),
        {name: figure for part in found for name, figure in part.figures.items()},
        (*notes, *(note for part in found for note in part.notes)),
    )


def _each_its_own(machine: Machine, world: int) -> Machine:
    """The machine with a device for every rank, though some are equal now."""
    ranks = range(world)
    devices = tuple(machine.device(rank).replace(name=f"engine {rank}") for rank in ranks)
    return machine.replace(devices=devices)


def _on_hosts(size: Size) -> Found:
    """Rows divided over two hosts, one of which is half as fast."""
    world = len(HOST_SPEEDS) * RANKS_PER_HOST
    speeds = tuple(2 if index < RANKS_PER_HOST else 1 for index in range(world))
    try:
        with (
            Hosts(len(HOST_SPEEDS), speeds=HOST_SPEEDS, bandwidth=BANDWIDTH) as hosts,
            Cluster(world, hosts=hosts, timeout=300.0) as cluster,
        ):
            found = static.compared(cluster, speeds, ROWS, size, name="hosts")
    except HostsError as error:
        return Found((), {}, (f"Emulated hosts were not measured: {error}",))
    note = f"Hosts: {RANKS_PER_HOST} engines on each of two, {HOST_SPEEDS} fast, {BANDWIDTH} links."
    return Found(found.rows, found.figures, (*found.notes, note))


def _partitioned() -> Found:
    """Processor time of dividing work over many devices, by the kind of their models."""
    rng = random.Random(0)
    sizes = [UNITS // part for part in (16, 8, 4, 2, 1)]
    taken: dict[str, list[float]] = {}
    for kind in KINDS:
        seconds = taken.setdefault(kind, [])
        for _ in range(9):
            models = []
            for _ in range(DEVICES):
                fixed, speed = rng.uniform(0, 1), rng.uniform(10, 100)
                models.append(TimeModel(tuple(Point(d, fixed + d / speed) for d in sizes), kind))
            began = time.process_time()
            partition(UNITS, models)
            seconds.append(1e3 * (time.process_time() - began))
    figures = {f"partition_ms_{kind}": Figure.of(seconds) for kind, seconds in taken.items()}
    figures["partition_ms"] = Figure.of([max(each) for each in zip(*taken.values(), strict=True)])
    note = f"Partition: {UNITS} units over {DEVICES} devices, in milliseconds of one processor."
    return Found((), figures, (note,))
