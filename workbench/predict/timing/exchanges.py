"""What exchanging a gradient of n bytes between p workers takes, by each algorithm, in closed form.

    ring                  2(p-1) α + 2(p-1)/p nβ + (p-1)/p nγ + S
    direct                2 α      + 2(p-1)/p nβ + (p-1)/p nγ + S
    halving-doubling      2 log2(p) α + 2(p-1)/p nβ + (p-1)/p nγ + S
    recursive doubling    log2(p) (α + nβ + nγ) + S
    parameter server      2 α      + 2(p-1) nβ + (p-1) nγ + S
    hierarchical          direct within each host, and of the hosts through their wires

A codec makes β's bytes fewer, not γ's: what was decoded is added. In all of these but the last two
each byte is encoded once and decoded (2p-1)/p times by a rank, in 3p-1 pieces of n/p: what it sends
on in the first half, its own sum, which it decodes like everybody else, and the others' sums. A
server decodes what all others send, and encodes once for them.

They hold where everything divides; `workbench.predict.traffic.collective_costs` has what travels
where nothing does. Direct has as many messages as the ring, all at once: their overhead on a rank
is in its α.

Sources: Pipe-SGD (Li et al. 2018, arXiv:1811.03619), sec. 4, for ring and parameter server: its
body was not available to us, the formulas are recalled, and the ring's is Patarasuk and Yuan's
(2009, doi:10.1016/j.jpdc.2008.09.002) but for S. Thakur, Rabenseifner and Gropp 2005,
doi:10.1177/1094342005051521, for the others; direct: MiMatrix (Chen et al. 2018,
arXiv:1802.02326); two levels: Goyal et al. 2017, arXiv:1706.02677, sec. 4.1.
"""

from collections.abc import Callable, Mapping
from math import ceil, log2
from types import MappingProxyType

from workbench.plan.codec import Codec
from workbench.plan.errors import ExperimentError
from workbench.predict.timing.terms import Terms

ITEM_BYTES = 4  # gradients are added up in fp32

Exchange = Callable[[int, float, Codec | None], Terms]


def ratio(codec: Codec | None, length: float) -> float:
    """Bytes that travel for a byte of fp32, of `length` values that are encoded together."""
    if codec is None:
        return 1.0
    values = max(1, ceil(length))
    return codec.encoded_bytes(values) / (ITEM_BYTES * values)


def ring(workers: int, nbytes: float, codec: Codec | None = None) -> Terms:
    """All-reduce in which a rank hears only from the one before it."""
    return _in_segments(workers, nbytes, codec, rounds=2 * (workers - 1))


def direct(workers: int, nbytes: float, codec: Codec | None = None) -> Terms:
    """All-reduce with two synchronisations, whatever the number of workers."""
    return _in_segments(workers, nbytes, codec, rounds=2)


def halving_doubling(workers: int, nbytes: float, codec: Codec | None = None) -> Terms:
    """All-reduce by recursive halving, then doubling, among a power of two of the workers.

    The others are folded in: two rounds more, and for the busiest link the whole gradient more.
    """
    power = 2 ** (workers.bit_length() - 1)
    terms = _in_segments(power, nbytes, codec, rounds=2 * log2(power))
    if workers == power:
        return terms
    once = ratio(codec, nbytes / ITEM_BYTES) * nbytes
    coded = 2 * nbytes if codec else 0.0
    pieces = 4 if codec else 0
    return terms + Terms(2, once, nbytes, 0, coded, coded, pieces)


def recursive_doubling(workers: int, nbytes: float, codec: Codec | None = None) -> Terms:
    """All-reduce in which pairs swap all that they have, at distances 1, 2, 4, ...

    Raises:
        ExperimentError: the number of workers is no power of two.
    """
    if workers & (workers - 1):
        raise ExperimentError(f"recursive doubling needs 2, 4, 8, ... workers, got {workers}")
    rounds = log2(workers)
    swapped, part = rounds * nbytes, ratio(codec, nbytes / ITEM_BYTES)
    coded = swapped if codec else 0.0
    pieces = 2 * rounds if codec else 0.0
    calls = float(workers > 1)
    return Terms(rounds, swapped * part, swapped, calls, coded, coded, pieces)


def parameter_server(workers: int, nbytes: float, codec: Codec | None = None) -> Terms:
    """Gradients to one of the workers, the sum back to all; its link carries them all."""
    if workers == 1:
        return Terms()
    others, part = workers - 1, ratio(codec, nbytes / ITEM_BYTES)
    carried, added = 2 * others * nbytes * part, others * nbytes
    if codec is None:
        return Terms(2, carried, added, 1)
    # The others encode before it decodes; then it encodes, and they decode with it.
    return Terms(2, carried, added, 1, 2 * nbytes, others * nbytes + nbytes, workers + 2)


def hierarchical(workers: int, ranks_per_host: int, nbytes: float) -> tuple[Terms, Terms]:
    """All-reduce on two levels: (within a host, through its wire).

    Each of a host's ranks carries its part of the gradient over the wire that they share, so that
    2(m-1)/m n cross it, of m hosts.

    Raises:
        ExperimentError: the hosts would have unequal numbers of workers.
    """
    if workers % ranks_per_host:
        raise ExperimentError(f"{workers} workers do not fill hosts of {ranks_per_host}")
    hosts = workers // ranks_per_host
    within = direct(ranks_per_host, nbytes)
    if hosts == 1:
        return within, Terms()
    crossing, own = 2 * (hosts - 1) / hosts * nbytes, nbytes / ranks_per_host
    rounds = 1 if hosts == 2 else 2
    return within, Terms(rounds, crossing, (hosts - 1) / hosts * own, 1)


FLAT: Mapping[str, Exchange] = MappingProxyType(
    {
        "ring": ring,
        "direct": direct,
        "halving_doubling": halving_doubling,
        "recursive_doubling": recursive_doubling,
        "parameter_server": parameter_server,
    }
)
"""Those that know no hosts: of (workers, bytes of the gradient, codec)."""


def _in_segments(workers: int, nbytes: float, codec: Codec | None, *, rounds: float) -> Terms:
    """A reduce-scatter and an all-gather of p segments."""
    if workers == 1:
        return Terms()
    segment = nbytes / workers
    moved = (workers - 1) * segment
    received = 2 * moved * ratio(codec, segment / ITEM_BYTES)
    if codec is None:
        return Terms(rounds, received, moved, 1)
    decoded = (2 * workers - 1) * segment
    return Terms(rounds, received, moved, 1, nbytes, decoded, 3 * workers - 1)
