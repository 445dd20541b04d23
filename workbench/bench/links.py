"""Part of `bench collectives`: who synchronises how often, on links that are slow or late.

    gloo                torch.distributed.all_reduce                   2 (k-1) dependent steps
    ring, direct        start_all_reduce and wait, by that algorithm   2 (k-1) and 2
    parameter server    start_reduce and start_broadcast               2, through one rank's link

All in place, one thread an engine, interleaved as in `collectives.py`. Slow links are those of
emulated hosts, one for each engine, and shape whatever crosses them: all four systems run. Late
ones are the workbench's own transport, in which a round's messages count as there so many seconds
after they have come; torch's is closed to that, so that gloo takes no part.

Predictions are the closed forms of `predict/timing`, with constants fitted to exchanges by ring and
direct of other sizes, on the same links; late ones add to the latency what was injected.
"""

import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.bench.exchanging import exchanged, seconds_to_add
from workbench.bench.late import apart, late
from workbench.bench.report import Cell, Figure
from workbench.bench.timing import KIB, MIB, Seconds, experiment_of, named, timed
from workbench.client.cluster import Cluster
from workbench.comm.collectives import start_all_reduce
from workbench.comm.groups.group import Group
from workbench.comm.groups.world import Seat, World
from workbench.comm.rooted import start_broadcast, start_reduce
from workbench.hosts.emulated.hosts import Hosts
from workbench.plan.experiment import Experiment
from workbench.predict.timing import FLAT, Fit, Measurement, fit
from workbench.store.errors import HostsError

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
    """Links to exchange over.

    Attributes:
        engines: how many.
        turns: for each size in bytes, how often a system sums in one turn.
        rate: of each engine's link, as `Hosts` takes it; None: they are on this host.
        late_s: seconds that messages come later.
    """

    engines: int
    turns: Mapping[int, int]
    rate: str | None = None
    late_s: float = 0.0

    @property
    def name(self) -> str:
        """In rows and figures."""
        return self.rate if self.rate is not None else f"{1e3 * self.late_s:g}ms"

    @property
    def systems(self) -> tuple[str, ...]:
        """Those that run."""
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
    """What was measured on some links.

    Attributes:
        rows: one for each size and system.
        figures: ratios of one round each.
        notes: what a reader must know.
    """

    rows: tuple[Mapping[str, Cell], ...]
    figures: Mapping[str, Figure]
    notes: tuple[str, ...]


def run(setting: Setting, rounds: int) -> Found:
    """Measures on these links; where this process cannot make them, a note says so."""
    with ExitStack() as stack:
        hosts = None
        if setting.rate is not None:
            try:
                hosts = stack.enter_context(Hosts(setting.engines, bandwidth=setting.rate))
            except HostsError as error:
                return Found((), {}, (f"links of {setting.rate} were not measured: {error}",))
        cluster = stack.enter_context(Cluster(setting.engines, hosts=hosts, timeout=120.0))
        ranks: list[tuple[Seconds, list[Measurement], float]] = cluster.call(
            "workbench.bench.links:measure",
            experiment_of(setting.engines),
            setting=setting,
            rounds=rounds,
        )
    seconds, exchanges, _ = ranks[0]
    addition = max(gamma for _, _, gamma in ranks)
    return found(setting, seconds, fit(exchanges, held={"reduction_s_per_byte": addition}))


def measure(
    seat: Seat, experiment: Experiment, *, weights: Path, setting: Setting, rounds: int
) -> tuple[Seconds, list[Measurement], float]:
    """What one engine does: exchanges for the constants, then the systems in turn.

    Args:
        seat: where this rank sits.
        experiment: whose ranks exchange.
        weights: not needed.
        setting: the links.
        rounds: turns that each system takes.

    Returns:
        Seconds of one sum on the slowest rank, for each size, system and round; exchanges by ring
        and direct, not late; and the seconds that adding a byte takes this rank.
    """
    with World.open(seat) as world:
        spec = ("bench", tuple(range(world.size)))
        group = apart(world.groups([spec])[spec])
        exchanges = exchanged(group, FITTED, ("ring", "direct"), rounds)
        with late(group, setting.late_s) if setting.late_s else nullcontext(group) as delayed:
            found = {size: _taken(delayed, setting, size, rounds) for size in setting.turns}
        return found, exchanges, seconds_to_add()


def _taken(group: Group, setting: Setting, size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each system's turns; the first one, which is not among them, warms up."""
    systems = _systems(group, torch.zeros(size // 4))
    seconds: dict[str, list[float]] = {name: [] for name in setting.systems}
    for _ in range(rounds + 1):
        for name, taken in seconds.items():
            taken.append(timed(systems[name], setting.turns[size], group))
    return {name: taken[1:] for name, taken in seconds.items()}


def _systems(group: Group, flat: Tensor) -> dict[str, Callable[[], object]]:
    """Sums of zeros stay small, however often they are taken."""
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
    """Rows, figures and notes of what one rank has measured.

    Args:
        setting: the links.
        seconds_of: sums on the slowest rank.
        constants: of the links, without what was injected.
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
