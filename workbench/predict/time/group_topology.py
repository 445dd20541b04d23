"""How long a group's ranks take for a collective, once all of them have arrived.

    seconds = rounds x latency + received / bandwidth + added x reduction   (`Link`)

on the rank that receives most. With b bytes and k ranks on m hosts of n ranks each, an all-reduce

    algorithm           received                      rounds          added
    direct              2 b (k-1)/k                   2               b (k-1)/k
    ring                2 b (k-1)/k                   2 (k-1)         b (k-1)/k
    halving_doubling    2 b (p-1)/p (+ b if k > p)    2 log2 p (+ 2)  b (p-1)/p (+ b if k > p)
    hierarchical        2 b (n-1)/n within a host     2               b (n-1)/n
                        2 b (m-1)/(m n) across hosts  2               b (m-1)/(m n)
    backend             the fastest of ring, halving_doubling, and two levels with either across

where p is the largest power of 2 up to k, and two hosts swap b/n in one round.
nccl and gloo do the same, and choose by size and hosts too. All other collectives are one exchange
among all ranks, or, where ranks share no memory, a ring of k-1 rounds.

Sources: `predict/traffic/collective_costs.py` for the all-reduces, whose bytes are these where
everything divides; the alpha-beta-gamma model of Pipe-SGD (arXiv:1811.03619, sec. 4).
"""

from dataclasses import dataclass

import numpy as np

from workbench.plan.collective.algorithm import AlgorithmName, chosen
from workbench.plan.machine.device import BY_BACKEND, INTO_NEW, Link
from workbench.plan.machine.machine import Machine


@dataclass(frozen=True)
class GroupTopology:
    """The ranks of one group, as far as the time of their collectives depends on them.

    Attributes:
        ranks: the number of ranks in the group.
        hosts: how many of these ranks each host has [hosts].
        within: the link between ranks of a host.
        across: the link between hosts.
        memory: whether ranks of a host share memory, as CPU engines do.
    """

    ranks: int
    hosts: tuple[int, ...]
    within: Link
    across: Link
    memory: bool

    @property
    def link(self) -> Link:
        """The link that connects all of them: the one between hosts, if there are several."""
        return self.within if len(self.hosts) == 1 else self.across

    def seconds(self, op: str, received: float, added: float = 0.0) -> float:
        """Seconds of a collective other than an all-reduce.

        Args:
            op: "all_gather", "reduce_scatter" or "all_to_all".
            received: the bytes of the rank that receives most.
            added: the bytes that a rank adds up.
        """
        if self.ranks == 1 or received == 0:
            return 0.0
        rounds = 1 if self.memory else self.ranks - 1
        return self.link.seconds(op, self.ranks, received, rounds, added)

    def rooted(self, moved: float, added: float) -> float:
        """Seconds of a collective with a root, such as a reduce or a broadcast.

        Args:
            moved: the bytes that the root receives or sends.
            added: the bytes that the root adds up.
        """
        if self.ranks == 1 or moved == 0:
            return 0.0
        if not self.link.has_measured("broadcast", self.ranks):
            return self.link.exchanges(self.ranks, moved, 1, added)
        moving = self.link.seconds("broadcast", self.ranks, moved / self.ranks, 1, 0)
        return moving + added * self.link.reduction_s_per_byte

    def all_reduce(
        self,
        nbytes: float,
        algorithm: AlgorithmName,
        *,
        beside: bool,
        into_new: bool = False,
        codec: str = "",
    ) -> "Sum":
        """The algorithm and the seconds of an all-reduce.

        Args:
            nbytes: the bytes that each rank contributes, as they are sent.
            algorithm: the algorithm that is asked for; "auto": the one that the ranks' transport
                chooses.
            beside: whether ranks compute meanwhile, and share no buffer.
            into_new: whether the sum is written to new memory, as for activations.
            codec: the name of the codec that compresses what is sent; "": none.
        """
        if self.ranks == 1 or nbytes == 0:
            return Sum("direct", 0.0)
        shared = self.hosts if self.memory else (1,) * self.ranks
        backend = "gloo" if self.memory else "nccl"
        name = chosen(algorithm, shared, backend, int(nbytes), beside=beside, codec=codec)
        if name != "backend":
            usual = chosen("auto", shared, backend, int(nbytes), beside=beside)
            measured = name == usual and not codec
            return Sum(name, self._flat(name, nbytes, measured=measured, into_new=into_new))
        if len(self.hosts) == 1 and self.within.has_measured(BY_BACKEND, self.ranks):
            return Sum("backend", _timed(self.within, "direct", nbytes, self.ranks, op=BY_BACKEND))
        ways = ["ring", "halving_doubling"]
        ways += [f"two levels, {way}" for way in ways] if self._levels else []
        return min((Sum(way, self._flat(way, nbytes)) for way in ways), key=lambda s: s.seconds)

    @property
    def _levels(self) -> bool:
        return 1 < len(self.hosts) < self.ranks

    def _flat(
        self, name: str, nbytes: float, *, measured: bool = True, into_new: bool = False
    ) -> float:
        """Seconds of one algorithm; a link has measured the one that ranks choose by themselves."""
        if name == "hierarchical" or name.startswith("two levels"):
            of_hosts = "swap" if len(self.hosts) == 2 else "direct"
            outer = of_hosts if name == "hierarchical" else name.rpartition(" ")[-1]
            most = max(self.hosts)
            inner = "direct" if self.memory else "ring"
            within = _timed(self.within, inner, nbytes, most)
            return within + _timed(self.across, outer, nbytes / most, len(self.hosts))
        op = INTO_NEW if into_new and self.link.has_measured(INTO_NEW, self.ranks) else "all_reduce"
        return _timed(self.link, name, nbytes, self.ranks, measured=measured, op=op)


@dataclass(frozen=True)
class Sum:
    """One all-reduce: its algorithm, and how many seconds it takes."""

    algorithm: str
    seconds: float


def topology_of(machine: Machine, members: range) -> GroupTopology:
    """The topology of these ranks of the world, which are at equal distances."""
    memory = machine.device(members[0]).kind == "cpu"
    across = machine.across or machine.within
    if machine.ranks_per_host is None or machine.across is None:
        return GroupTopology(len(members), (len(members),), machine.within, across, memory)
    counts = np.bincount(np.asarray(members) // machine.ranks_per_host)
    hosts = tuple(counts[counts > 0].tolist())
    return GroupTopology(len(members), hosts, machine.within, across, memory)


def _timed(
    link: Link,
    name: str,
    nbytes: float,
    ranks: int,
    *,
    measured: bool = True,
    op: str = "all_reduce",
) -> float:
    if ranks == 1:
        return 0.0
    received, rounds, added = _moved(name, nbytes, ranks)
    if not measured:
        return link.exchanges(ranks, received, rounds, added)
    return link.seconds(op, ranks, received, rounds, added)


def _moved(name: str, nbytes: float, ranks: int) -> tuple[float, int, float]:
    """(received bytes, rounds, added bytes) of the rank that has most to do."""
    share = nbytes * (ranks - 1) / ranks
    match name:
        case "swap":
            return nbytes, 1, nbytes
        case "direct":
            return 2 * share, 2, share
        case "ring":
            return 2 * share, 2 * (ranks - 1), share
        case _:
            power = 2 ** (ranks.bit_length() - 1)
            levels, folded = power.bit_length() - 1, ranks > power
            share = nbytes * (power - 1) / power
            whole = nbytes * folded
            return 2 * share + whole, 2 * levels + 2 * folded, share + whole
