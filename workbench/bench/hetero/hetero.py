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
from collections.abc import Iterator, Sequence

from workbench.bench.hetero import live, reshard, static
from workbench.bench.hetero.static import Case, Found, Size
from workbench.bench.progress import Part, Progress
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


def run(progress: Progress, *, quick: bool) -> Iterator[Report]:
    """Measures all parts; `quick` without hosts, small and on few engines."""
    size, slowdowns = (SMALL, 1) if quick else (FULL, SLOWDOWNS)
    compared = [(speeds, case) for speeds in size.speeds for case in size.cases]
    progress.begin(
        Part("static", len(compared), 20 if quick else 100),
        Part("live", slowdowns, 60 if quick else 150),
        *([] if quick else [Part("hosts", 1, 100)]),
        Part("re-cut", 1, 10 if quick else 60),
        Part("partition", 1, 5),
    )
    found: list[Found] = []
    if any(map(progress.wants, ("static", "live"))):
        with Cluster(len(size.speeds[0]), timeout=300.0) as cluster:
            bare: Machine | None = None
            for speeds, case in progress.each("static", compared):
                for engine, speed in enumerate(speeds):
                    cluster.slow(engine, max(speeds) / speed)
                try:
                    if bare is None:  # for all speeds: at a twentieth's it would take minutes
                        measured = cluster.calibrate(within_s=size.within_s, keep=False)
                        bare = _each_its_own(measured, len(cluster))
                    found.append(static.compared(cluster, speeds, case, size, bare))
                finally:
                    cluster.mend()
                yield _report(found, size)
            before, slowed = list(found), list[live.Round]()
            for _ in progress.each("live"):
                slowed.append(live.slowdown(cluster, size.cases[0], quick=quick))
                found = [*before, live.found_in(slowed, len(cluster))]
                yield _report(found, size)
    for _ in progress.each("hosts"):
        found.append(_on_hosts(size))
        yield _report(found, size)
    for _ in progress.each("re-cut"):
        with Cluster(2 if quick else RANKS, timeout=300.0) as cluster:
            found.append(reshard.run(cluster, "" if quick else "vgg11", rounds=1 if quick else 3))
        yield _report(found, size)
    for _ in progress.each("partition"):
        found.append(_partitioned())
        yield _report(found, size)


def _report(found: Sequence[Found], size: Size) -> Report:
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
        engines=len(size.speeds[0]),
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
