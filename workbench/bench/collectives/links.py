"""Part of `bench collectives`: the cost of synchronisations on slow and on late links.

    gloo                torch.distributed.all_reduce                   2 (k-1) dependent steps
    ring, direct        start_all_reduce and wait, by that algorithm   2 (k-1) and 2
    parameter server    start_reduce and start_broadcast               2, through one rank's link

All in place, one thread an engine, interleaved as in `collectives.py`. Slow links are those of
emulated hosts, one for each engine, and shape all traffic that crosses them: all four systems run.
Late links delay the workbench's own transport: a round's messages count as received so many seconds
after they arrived. gloo cannot be delayed so, and takes no part.

Predictions are those of `predict/closed_form`, with constants fitted to exchanges by ring and
direct of other sizes, on the same links; late links add the injected delay to the latency.

"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.bench.collectives.timing import (
    KIB,
    MIB,
    Seconds,
    exchanged,
    experiment_of,
    named,
    seconds_to_add,
    timed,
)
from workbench.bench.report import Cell, Figure
from workbench.client.cluster import Cluster
from workbench.comm.all_reduce import start_all_reduce
from workbench.comm.groups.group import Group
from workbench.comm.groups.world import RankConfig, World
from workbench.comm.messages.waiting import MessageWork, Waiters
from workbench.comm.nonblocking import start_broadcast, start_reduce
from workbench.hosts.emulated.hosts import Hosts
from workbench.plan.experiment.experiment import Experiment
from workbench.predict.closed_form import FLAT, Fit, Measurement, fit
from workbench.store.errors import HostsError


def apart(group: Group) -> Group:
    """A group of the same ranks, as if none of them shared memory."""
    assert group.link is not None
    link = replace(group.link, hosts=tuple((rank,) for rank in range(group.size)), local=None)
    return Group("apart", group.ranks, group.rank, group.recorder, link)


@contextmanager
def late(group: Group, late_s: float) -> Iterator[Group]:
    """A group of the same ranks, whose messages arrive so many seconds later."""
    assert group.link is not None
    waiters = _LateWaiters(late_s)
    link = replace(group.link, waiters=waiters)
    try:
        yield Group("late", group.ranks, group.rank, group.recorder, link)
    finally:
        waiters.close()


class _LateWaiters(Waiters):
    """Waits that end a while after messages arrived; all messages are delayed concurrently."""

    def __init__(self, late_s: float) -> None:
        super().__init__()
        self._late_s = late_s

    def begin(self, works: Sequence[dist.Work]) -> MessageWork:
        return super().begin([*works, _Pause(self._late_s)])


class _Pause(dist.Work):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def wait(self, *_timeout: object) -> bool:
        time.sleep(self._seconds)
        return True


FITTED = (4 * KIB, 256 * KIB, 2 * MIB)
MODELS: Mapping[str, str] = MappingProxyType(
    {
        "gloo": "ring",
        "ring": "ring",
        "direct": "direct",
        "parameter server": "parameter_server",
    }
)
"""The closed form of each system."""


@dataclass(frozen=True)
class Setting:
    """The links that a measurement runs over.

    Attributes:
        engines: the number of engines.
        turns: how often a system all-reduces in one turn, for each size in bytes.
        rate: the bandwidth of each engine's link, as `Hosts` takes it; None: all are on this host.
        late_s: the seconds by which messages are delayed.
    """

    engines: int
    turns: Mapping[int, int]
    rate: str | None = None
    late_s: float = 0.0

    @property
    def name(self) -> str:
        """The name of the links in rows and figures."""
        return self.rate if self.rate is not None else f"{1e3 * self.late_s:g}ms"

    @property
    def systems(self) -> tuple[str, ...]:
        """The names of the systems that run."""
        return tuple(name for name in MODELS if self.rate is not None or name != "gloo")


QUICK = (
    Setting(4, {KIB: 5, MIB: 1}, rate="1gbit"),
    Setting(4, {KIB: 5, MIB: 1}, late_s=0.005),
)
FULL = (
    Setting(4, {KIB: 50, 64 * KIB: 20, MIB: 5, 4 * MIB: 2, 16 * MIB: 1}, rate="1gbit"),
    Setting(4, {KIB: 50, 64 * KIB: 10, MIB: 1, 4 * MIB: 1}, rate="100mbit"),
    Setting(4, {KIB: 10, 64 * KIB: 10, MIB: 5, 4 * MIB: 2}, late_s=0.005),
    Setting(8, {KIB: 10, 64 * KIB: 10, MIB: 2}, late_s=0.005),
)


@dataclass(frozen=True)
class Found:
    """The measurements on some links.

    Attributes:
        rows: one row for each size and system.
        figures: the ratios of one round each.
        notes: the notes that a reader needs.
    """

    rows: tuple[Mapping[str, Cell], ...]
    figures: Mapping[str, Figure]
    notes: tuple[str, ...]


def run(setting: Setting, rounds: int) -> Found:
    """Measures on these links; if this process cannot make them, a note says so."""
    with ExitStack() as stack:
        hosts = None
        if setting.rate is not None:
            try:
                hosts = stack.enter_context(Hosts(setting.engines, bandwidth=setting.rate))
            except HostsError as error:
                return Found((), {}, (f"links of {setting.rate} were not measured: {error}",))
        return run_on(
            stack.enter_context(Cluster(setting.engines, hosts=hosts, timeout=120.0)),
            setting,
            rounds,
        )


def run_on(cluster: Cluster, setting: Setting, rounds: int) -> Found:
    """Measures on a cluster that has these engines and links."""
    ranks: list[tuple[Seconds, list[Measurement], float]] = cluster.call(
        "workbench.bench.collectives.links:measure",
        experiment_of(setting.engines),
        setting=setting,
        rounds=rounds,
    )
    seconds, exchanges, _ = ranks[0]
    addition = max(gamma for _, _, gamma in ranks)
    return found(setting, seconds, fit(exchanges, held={"reduction_s_per_byte": addition}))


def measure(
    config: RankConfig, experiment: Experiment, *, weights: Path, setting: Setting, rounds: int
) -> tuple[Seconds, list[Measurement], float]:
    """Measures on one engine: exchanges for the constants, then the systems in turn.

    Args:
        config: the rank's number, device and connection to the others.
        experiment: the experiment whose ranks exchange.
        weights: the file of initial weights, which is not used.
        setting: the links.
        rounds: the number of turns that each system takes.

    Returns:
        The seconds of one all-reduce on the slowest rank, for each size, system and round;
        exchanges by ring and direct, not delayed; and the seconds that this rank takes to add a
        byte.
    """
    with World.open(config) as world:
        spec = ("bench", tuple(range(world.size)))
        group = apart(world.groups([spec])[spec])
        exchanges = exchanged(group, FITTED, ("ring", "direct"), rounds)
        with late(group, setting.late_s) if setting.late_s else nullcontext(group) as delayed:
            found = {size: _taken(delayed, setting, size, rounds) for size in setting.turns}
        return found, exchanges, seconds_to_add()


def _taken(group: Group, setting: Setting, size: int, rounds: int) -> dict[str, list[float]]:
    """The seconds of each system's turns, without a first one that warms up."""
    systems = _systems(group, torch.zeros(size // 4))
    seconds: dict[str, list[float]] = {name: [] for name in setting.systems}
    for _ in range(rounds + 1):
        for name, taken in seconds.items():
            taken.append(timed(systems[name], setting.turns[size], group))
    return {name: taken[1:] for name, taken in seconds.items()}


def _systems(group: Group, flat: Tensor) -> dict[str, Callable[[], object]]:
    """The systems; sums of zeros stay small, however often they are taken."""
    assert group.link is not None
    torchs = partial(dist.all_reduce, flat, group=group.link.process_group)

    def server() -> None:
        start_reduce(flat, 0, group).wait()
        start_broadcast(flat, 0, group).wait()

    return {
        "gloo": torchs,
        "ring": lambda: start_all_reduce(flat, group, algorithm="ring").wait(),
        "direct": lambda: start_all_reduce(flat, group, algorithm="direct").wait(),
        "parameter server": server,
    }


def found(setting: Setting, seconds_of: Seconds, constants: Fit) -> Found:
    """The rows, figures and notes of one rank's measurements.

    Args:
        setting: the links.
        seconds_of: the seconds of an all-reduce on the slowest rank, for each size, system and
            round.
        constants: the fitted constants of the links, without the injected delay.
    """
    network = constants.network
    network = replace(network, latency_s=network.latency_s + setting.late_s)
    rows: list[Mapping[str, Cell]] = []
    figures, errors = {}, []
    for size, systems in seconds_of.items():
        for name, seconds in systems.items():
            median = statistics.median(seconds)
            expected = network.seconds(FLAT[MODELS[name]](setting.engines, size, None))
            errors.append(abs(expected / median - 1))
            rows.append(
                {
                    "links": setting.name,
                    "ranks": setting.engines,
                    "size": named(size),
                    "system": name,
                    "ms": 1e3 * median,
                    "min": 1e3 * min(seconds),
                    "max": 1e3 * max(seconds),
                    "predicted ms": 1e3 * expected,
                }
            )
        for name, seconds in systems.items():
            if name != "direct":
                pairs = zip(seconds, systems["direct"], strict=True)
                against = name.replace(" ", "_")
                label = f"direct_vs_{against}_{setting.name}_{setting.engines}_{named(size)}"
                figures[label] = Figure.of([a / b for a, b in pairs])
    figures[f"prediction_error_{setting.name}_{setting.engines}"] = Figure.of(errors)
    where = f"{setting.engines} engines x 1 thread, "
    where += f"links of {setting.rate}" if setting.rate else f"messages {setting.name} late"
    return Found(tuple(rows), figures, (f"{where}: {constants}",))
