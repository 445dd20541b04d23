"""The cost of codecs: seconds for each byte, against the network time that they save.

First each codec alone, on one core, with the operations of a rank in a ring of four: every element
is encoded once, three quarters are decoded and added, and all are decoded once
(`comm/algorithms/flat.py`). Then an all-reduce over four engines, traced: the time of encoding,
adding and decoding in it.

The network has 1 Gbit/s, on which the uncoded values would take 2 (p-1)/p n / (125 MB/s).
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import get_args

import torch

from workbench.bench.plot import Bar, Chart
from workbench.bench.progress import Part, Progress
from workbench.bench.report import Cell, Figure, Report
from workbench.client.cluster import Cluster
from workbench.comm.codecs import PieceCoding, coder_of
from workbench.plan.collective.codec import AnyCodec, Codec, CodecName, OwnCodec, as_codec
from workbench.plan.experiment.metrics import PhaseName

RANKS = 4
MIB = 2**20
WIRE_BYTES_PER_S = 125e6
CODING: tuple[PhaseName, ...] = ("encode", "reduce", "decode")
# How often each element goes through each operation, on one rank of a ring.
TIMES = {"encode": 1.0, "add": (RANKS - 1) / RANKS, "decode": 1.0}

Codecs = dict[str, AnyCodec]
Seconds = dict[str, dict[str, list[float]]]


def run(progress: Progress, *, quick: bool, codec: str | None = None) -> Iterator[Report]:
    """Measures every codec; `quick` takes fewer rounds and 16 MiB instead of 64.

    Args:
        progress: the progress of the rounds.
        quick: whether it is short.
        codec: "module:attribute" or entry point of one more codec; None: there is none.
    """
    nbytes, rounds = (16 * MIB, 3) if quick else (64 * MIB, 7)
    own = () if codec is None else (codec,)
    progress.begin(Part("rounds", rounds, 5 if quick else 20))
    with Cluster(RANKS, timeout=120.0) as cluster:
        yield from compare(cluster, progress, nbytes, own)


def compare(
    cluster: Cluster, progress: Progress, nbytes: int, own: Sequence[str] = ()
) -> Iterator[Report]:
    """Measures every codec on a cluster of four engines, in rounds.

    Args:
        cluster: the cluster whose engines communicate.
        progress: the progress of the part "rounds", in each of which each codec takes its turn.
        nbytes: the bytes of fp32 values on each rank.
        own: codecs of your own, "module:attribute" or entry points; without error feedback.
    """
    names: tuple[CodecName, ...] = get_args(CodecName)
    codecs: Codecs = {name: Codec(name=name) for name in names}
    found: list[OwnCodec] = [as_codec(one) for one in own]
    codecs |= {one.name: one.replace(error_feedback=False) for one in found}
    x = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(0))
    alone: Seconds = {name: {op: [] for op in TIMES} for name in codecs}
    traced: dict[str, list[float]] = {name: [] for name in codecs}
    measure(codecs, x)  # warms up
    for _ in progress.each("rounds"):
        for name, seconds in measure(codecs, x).items():
            for op in TIMES:
                alone[name][op].append(seconds[op])
        for name, codec in codecs.items():
            trace = cluster.trace_all_reduce(nbytes, algorithm="ring", codec=codec, times=1)
            traced[name].append(max(rank.seconds_of(CODING) for rank in trace.ranks))
        yield _report(codecs, alone, traced, nbytes)


def measure(codecs: Codecs, x: torch.Tensor) -> dict[str, dict[str, float]]:
    """The seconds of each codec's operations on the values in x, one after another, on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        out = torch.zeros(x.numel())
        found = {}
        for name, codec in codecs.items():
            coding = PieceCoding(coder_of(codec, x.device), x.device)
            (wire,) = coding.buffers([x.numel()])
            operations = {
                "encode": partial(coding.encode, x, wire),
                "add": partial(coding.add, wire, out),
                "decode": partial(coding.decode, wire, out),
            }
            found[name] = {op: _timed(operation) for op, operation in operations.items()}
        return found
    finally:
        torch.set_num_threads(threads)


def _timed(operation: Callable[[], None]) -> float:
    began = time.perf_counter()
    operation()
    return time.perf_counter() - began


def _report(codecs: Codecs, alone: Seconds, traced: dict[str, list[float]], nbytes: int) -> Report:
    rounds = len(next(iter(traced.values())))
    wire_s = 2 * (RANKS - 1) / RANKS * nbytes / WIRE_BYTES_PER_S
    rows: list[dict[str, Cell]] = []
    figures = {}
    for name, codec in codecs.items():
        per_byte = {op: 1e9 * statistics.median(s) / nbytes for op, s in alone[name].items()}
        rows.append(
            {
                "codec": name,
                "smaller": nbytes / codec.encoded_bytes(nbytes // 4),
                **{f"{op} ns/byte": value for op, value in per_byte.items()},
            }
        )
        each = [
            sum(TIMES[op] * alone[name][op][index] for op in TIMES) / wire_s
            for index in range(rounds)
        ]
        figures[f"{name}_coding_vs_transfer"] = Figure.of(each)
        figures[f"{name}_coding_traced_vs_transfer"] = Figure.of([s / wire_s for s in traced[name]])
    bars = tuple(
        Bar(name, figure.median, figure.min, figure.max, "int8" in name)
        for name, figure in figures.items()
    )
    return Report(
        "codecs",
        tuple(rows),
        figures,
        (
            f"{nbytes // MIB} MiB of fp32 on each rank, one thread; bytes are those of fp32. "
            f"Figures: coding in a ring of {RANKS} as a part of what the uncoded values take on a "
            f"wire of 1 Gbit/s ({1e3 * wire_s:.0f} ms), alone and in an all-reduce of {RANKS} "
            f"engines; {rounds} interleaved rounds: median, range.",
        ),
        (Chart("coding, as a part of the uncoded transfer at 1 Gbit/s", bars, target=0.15),),
        engines=RANKS,
    )
