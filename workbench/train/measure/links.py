"""How long collectives take, in groups of every size, all groups at once.

    all_reduce       in place, of a buffer of the group, as gradients are summed
    all_reduce into new memory,
    all_gather, reduce_scatter, all_to_all    out of place, as activations are converted
    all_reduce by the backend, exchange,
    broadcast                                 through torch's communicator: as parameters are
                                              averaged, what other algorithms consist of, and as
                                              a server sends weights

Beside them, what a sum of gradients costs the computation that goes on meanwhile,

    alone       | products |            | sum |
    together    | start | product | poll | product | poll | ... | wait |

where one all-reduce spends its time on each rank (`trace_sums`), and what sums are on the ranks of
a cluster (`recorded_sums`).
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.comm.algorithms.executor import RoundExecutor
from workbench.comm.all_reduce import all_reduce, start_all_reduce
from workbench.comm.collectives import all_gather, all_to_all, reduce_scatter
from workbench.comm.groups.group import Group
from workbench.comm.groups.world import RankConfig, World
from workbench.comm.messages.flat import MessageRound, MessageRounds, accumulator
from workbench.comm.messages.recorder import BytesBySender
from workbench.comm.nonblocking import start_broadcast
from workbench.comm.pending import Pending
from workbench.plan.experiment.experiment import Experiment, Synchronous
from workbench.plan.experiment.metrics import CollectiveTrace
from workbench.plan.machine.device import BY_BACKEND, EXCHANGE, INTO_NEW
from workbench.plan.placement.placement import (
    Shard,
    apportion,
    group_sizes,
    replica_groups,
    shard_groups,
)
from workbench.train.measure.repeating import Repetition, Until, estimate, finish, slowest

_UNTIL = Until(relative=0.05, least=5, most=40)
_BYTES = 2**23
_SIDE = 192  # of the matrices that are multiplied
_PARTS = 12  # after each of which the sum is polled, as after a layer's gradient
_LONGER = 2.0  # products take so many times as long as the sum


@dataclass(frozen=True)
class OverlapCost:
    """What a sum costs the computation that goes on meanwhile.

    Attributes:
        busy: the share of its time that this rank's thread spends on it.
        slowdown: how many times as long products take while it goes on.
    """

    busy: float
    slowdown: float


def overlap_cost(group: Group, whole: Group, device: torch.device, within_s: float) -> OverlapCost:
    """Measures a sum of gradients beside products, and both alone."""
    a = torch.ones(_SIDE, _SIDE, device=device)
    flat = group.buffer(_BYTES // 4, a)

    def products(times: int, pending: Pending | None = None) -> tuple[float, float]:
        """Seconds of the products, and of the polls between them."""
        computing = polling = 0.0
        for _ in range(_PARTS):
            began = time.perf_counter()
            for _ in range(times):
                a @ a
            finish(device)
            computed = time.perf_counter()
            if pending is not None:
                pending.poll()
            computing += computed - began
            polling += time.perf_counter() - computed
        return computing, polling

    one = slowest(min(products(1)[0] for _ in range(3)), whole) / _PARTS
    alone_s = slowest(_alone(group, flat, device), whole)
    times = max(1, round(_LONGER * alone_s / _PARTS / one))
    repetition = Repetition(whole, _UNTIL, within_s)
    seconds: list[NDArray[np.float64]] = []
    while repetition.goes_on(seconds):
        alone, _ = products(times)
        began = time.perf_counter()
        pending = start_all_reduce(flat, group)
        started = time.perf_counter() - began
        together, polled = products(times, pending)
        began = time.perf_counter()
        pending.wait()
        finish(device)
        waited = time.perf_counter() - began
        again = _alone(group, flat, device)
        seconds.append(np.array([alone, together, started + polled + waited, again]))
    alone, together, spent, summing = estimate(np.stack(seconds))[0].tolist()
    return OverlapCost(min(1.0, spent / summing), max(1.0, together / alone))


def _alone(group: Group, flat: Tensor, device: torch.device) -> float:
    began = time.perf_counter()
    start_all_reduce(flat, group).wait()
    finish(device)
    return time.perf_counter() - began


Seconds = NDArray[np.float64]

SIZES = (2**12, 2**16, 2**20, 2**23, 2**26)
"""Bytes of the whole tensor."""
_SHARES = (1, 1, 1, 2, 6)  # of the time, for each size: large sums leave the cache
_OPS = (
    "all_reduce",
    INTO_NEW,
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    BY_BACKEND,
    EXCHANGE,
    "broadcast",
)
_NAMES = {INTO_NEW: "all_reduce", BY_BACKEND: "all_reduce"}  # in the record
_ADDING = ("all_reduce", INTO_NEW, BY_BACKEND, "reduce_scatter")
_TOGETHER, _ROW_S = 2**18, 0.02  # small ones are timed in a row of so many bytes, or seconds
_PATIENCE = 4.0  # a size may take so many times its share of the time, repeated so often:
_REPEATED = 3
_COLUMNS = 64
_EVERYONE = "calibration"


@dataclass(frozen=True)
class Timed:
    """One collective on this rank.

    Attributes:
        received: bytes that came to this rank; a root gets none.
        rounds: the exchanges that followed each other.
        added: bytes that this rank added up.
    """

    op: str
    ranks: tuple[int, ...]
    seconds: float
    received: int
    rounds: int
    added: int


@dataclass(frozen=True)
class LinksMeasured:
    collectives: tuple[Timed, ...]
    overlap_costs: dict[tuple[int, ...], OverlapCost]


def families(world_size: int) -> list[tuple[tuple[int, ...], ...]]:
    """The ways to part the world into groups that plans have: of neighbours, and of replicas."""
    found = []
    for k in group_sizes(world_size)[1:]:
        found.append(shard_groups(k, world_size))
        if k < world_size:
            found.append(replica_groups(world_size // k, world_size))
    return found


def links(config: RankConfig, experiment: Experiment, *, within_s: float) -> LinksMeasured:
    """Measures collectives between the ranks of an experiment's plan."""
    with World.open(config) as world:
        parted = families(world.size)
        everyone = (_EVERYONE, tuple(range(world.size)))
        specs = [(f"family {i}", ranks) for i, family in enumerate(parted) for ranks in family]
        groups = world.groups([everyone, *specs])
        whole = groups.pop(everyone)
        slots = len(groups) * (len(_OPS) * sum(_SHARES) + 1)
        budget = _Budget(whole, within_s, slots)
        found: list[Timed] = []
        costs = {}
        for group in groups.values():  # of each family, the one that this rank is in
            found += _Measuring(group, world.device, budget).collectives()
            costs[group.ranks] = overlap_cost(group, whole, world.device, budget.next())
        return LinksMeasured(tuple(found), costs)


class _Budget:
    """What is left of the time, in equal shares; all ranks get the same answers."""

    def __init__(self, whole: Group, within_s: float, slots: int) -> None:
        self.whole, self._slots = whole, slots
        self._end = time.perf_counter() + within_s

    def skip(self, slots: int) -> None:
        self._slots -= slots

    def next(self, slots: int = 1) -> float:
        """The next so many shares, in seconds."""
        left = -slowest(time.perf_counter() - self._end, self.whole)
        share = max(0.0, left) / max(1, self._slots) * slots
        self._slots -= slots
        return share


class _Measuring:
    """Times every collective of one group, while the others of its family do the same."""

    def __init__(self, group: Group, device: torch.device, budget: _Budget) -> None:
        self.group, self.device, self.budget = group, device, budget
        self.whole = budget.whole

    def collectives(self) -> Iterator[Timed]:
        """Each op at ascending sizes, as long as there is time."""
        for op in _OPS:
            seconds: list[float] = []
            for index, size in enumerate(SIZES):
                share = self.budget.next(_SHARES[index])
                if index > 2:
                    grown = (seconds[-1] - seconds[-2]) / (SIZES[index - 1] - SIZES[index - 2])
                    if grown * size * _REPEATED > _PATIENCE * share:
                        self.budget.skip(sum(_SHARES[index + 1 :]))
                        break
                timed = self._timed(op, size, share)
                seconds.append(slowest(timed.seconds, self.whole))
                yield timed

    def _timed(self, op: str, size: int, within_s: float) -> Timed:
        call, moved = self._call(op, size)
        call()
        before, began = self._counts(op), time.perf_counter()
        call()
        once_s = slowest(time.perf_counter() - began, self.whole)
        times = max(1, min(_TOGETHER // size, round(_ROW_S / once_s)))
        received, rounds = (b - a for a, b in zip(before, self._counts(op), strict=True))
        repetition = Repetition(self.whole, _UNTIL, within_s)
        seconds: list[Seconds] = []
        while repetition.goes_on(seconds):
            began = time.perf_counter()
            for _ in range(times):
                call()
            finish(self.device)
            seconds.append(np.array([(time.perf_counter() - began) / times]))
        mean, _ = estimate(np.stack(seconds))
        added = moved if op in _ADDING else 0
        return Timed(op, self.group.ranks, float(mean[0]), received, rounds, added)

    def _call(self, op: str, size: int) -> tuple[Callable[[], object], int]:
        """What to call; and the bytes that a rank has to add up of others', if it is a sum."""
        group, k = self.group, self.group.size
        rows = max(1, size // 4 // _COLUMNS // k) * k
        x = torch.zeros(rows, _COLUMNS, device=self.device)
        own = x[: rows // k].clone()
        by_rows, by_columns = Shard(0, (rows // k,) * k), Shard(1, apportion(_COLUMNS, (1,) * k))
        moved = x.nbytes * (k - 1) // k
        match op:
            case "all_reduce":
                flat = group.buffer(x.numel(), x)
                return lambda: start_all_reduce(flat, group).wait(), moved
            case _ if op == INTO_NEW:
                return lambda: all_reduce(x, group), moved
            case _ if op == BY_BACKEND:
                flat = x.view(-1)
                return lambda: start_all_reduce(flat, group, algorithm="backend").wait(), moved
            case _ if op == EXCHANGE:
                travelling = own.view(-1).to(
                    self.device if group.link is None else group.link.device
                )
                return lambda: _exchange(travelling, group), moved
            case "broadcast":
                return lambda: start_broadcast(x.view(-1), 0, group).wait(), moved
            case "all_gather":
                return lambda: all_gather(own, by_rows, group), moved
            case "reduce_scatter":
                return lambda: reduce_scatter(x, by_rows, group), moved
            case _:
                return lambda: all_to_all(own, by_rows, by_columns, group), moved

    def _counts(self, op: str) -> tuple[int, int]:
        """(bytes, rounds) that this rank's record has so far."""
        name = _NAMES.get(op, op)
        rows = [r for r in self.group.recorder.rows() if (r.group, r.op) == (self.group.name, name)]
        return sum(row.bytes for row in rows), sum(row.rounds for row in rows)


def _exchange(own: torch.Tensor, group: Group) -> None:
    """Every rank sends its piece to the next one, and takes that of the one before."""
    arrived = torch.empty_like(own)

    def rounds() -> MessageRounds:
        behind, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        yield MessageRound(((behind, own),), ((before, arrived),))

    RoundExecutor(rounds(), group.call(EXCHANGE, "calibration", "step")).wait()


def trace_sums(
    config: RankConfig, experiment: Experiment, *, weights: object, numel: int, times: int
) -> CollectiveTrace:
    """Sums as the experiment's gradients are, out of place, and traces it.

    All ranks leave a meeting together before each sum. Of several the trace is of the one whose
    slowest rank took the median time; one more has warmed up.

    Returns:
        Of the same sum on every rank.
    """
    sync = experiment.sync
    assert isinstance(sync, Synchronous)
    dtype = torch.float64 if experiment.precision == "fp64" else torch.float32
    with World.open(config) as world:
        spec = ("trace", tuple(range(world.size)))
        group = world.groups([spec])[spec]
        generator = torch.Generator().manual_seed(world.rank)
        x = torch.randn(numel, generator=generator, dtype=dtype).to(world.device)
        keeps = sync.codec is not None and sync.codec.error_feedback
        residual = torch.zeros_like(x, dtype=accumulator(dtype)) if keeps else None
        each, found = Shard(0, (1,) * world.size), []
        for _ in range(1 + times):
            all_gather(torch.zeros(1, device=x.device), each, group)
            with world.recorder.tracing() as traces:
                all_reduce(
                    x,
                    group,
                    algorithm=sync.algorithm,
                    codec=sync.codec,
                    residual=residual,
                    layer="gradients",
                )
            found += traces
        mine = torch.tensor([[trace.seconds for trace in found[1:]]], device=x.device)
        slowest = all_gather(mine, each, group).amax(0)
        return found[1 + int(slowest.argsort()[times // 2])]


@dataclass(frozen=True)
class RecordedSum:
    """One sum on one rank.

    Attributes:
        error: the largest difference to what one process sums, relative to the sum of magnitudes.
        bytes: the bytes of these messages from each rank [ranks].
    """

    digest: str
    error: float
    messages: int
    bytes: tuple[int, ...]


def recorded_sums(
    config: RankConfig, experiment: Experiment, *, weights: object, lengths: Sequence[int]
) -> list[RecordedSum]:
    """Sums normally distributed values of fp32 as the experiment's gradients are.

    Returns:
        For each length, what this rank has and received.
    """
    sync = experiment.sync
    assert isinstance(sync, Synchronous)
    algorithm, codec, found = sync.algorithm, sync.codec, []
    with World.open(config) as world:
        spec = ("check", tuple(range(world.size)))
        group = world.groups([spec])[spec]
        for length in lengths:
            x, label = _summand(length, world.rank).to(world.device), str(length)
            keeps = codec is not None and codec.error_feedback
            left = torch.zeros_like(x) if keeps else None
            world.recorder.by_sender = by_sender = BytesBySender()
            total = all_reduce(
                x, group, algorithm=algorithm, codec=codec, residual=left, layer=label
            ).cpu()
            world.recorder.by_sender = None
            exact = torch.stack([_summand(length, rank) for rank in range(world.size)]).double()
            off, size = (total - exact.sum(0)).abs(), exact.abs().sum(0)
            from_rank = {sender: size for _, _, sender, size in by_sender.rows()}
            (row,) = [row for row in world.recorder.rows() if row.layer == label]
            found.append(
                RecordedSum(
                    hashlib.blake2b(total.numpy().tobytes(), digest_size=16).hexdigest(),
                    float((off / size.clamp_min(1e-30)).max()),
                    row.messages,
                    tuple(from_rank.get(rank, 0) for rank in range(world.size)),
                )
            )
    return found


def _summand(length: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * length + rank)
    return torch.randn(length, generator=generator)
