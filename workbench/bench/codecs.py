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
from torch import nn

from workbench.bench.harness.match import Turn, take_turns
from workbench.bench.harness.progress import Part, Progress
from workbench.bench.harness.report import MIB, Cell, Figure, Report
from workbench.client.cluster import Cluster
from workbench.comm.codecs import PieceCoding, coder_of
from workbench.model.tracing.trace import trace
from workbench.plan.collective.codec import AnyCodec, Codec, CodecName, OwnCodec, as_codec
from workbench.plan.experiment.experiment import SGD, Experiment, Synchronous
from workbench.plan.plans.plan import Plan

RANKS, FEATURES = 4, 1024
WIRE_BYTES_PER_S = 125e6
# How often each element goes through each operation, on one rank of a ring.
TIMES = {"encode": 1.0, "add": (RANKS - 1) / RANKS, "decode": 1.0}

Codecs = dict[str, AnyCodec]
Seconds = dict[str, dict[str, list[float]]]


def run(progress: Progress, *, quick: bool, codec: str | None = None) -> Iterator[Report]:
    """Measures every codec; `quick` takes fewer rounds and 16 MiB instead of 64.

    `codec` is "module:attribute" or the entry point of one more.
    """
    nbytes, rounds = (16 * MIB, 3) if quick else (64 * MIB, 7)
    own = () if codec is None else (codec,)
    progress.begin(Part("rounds", rounds, 5 if quick else 20))
    with Cluster(RANKS, timeout=120.0) as cluster:
        yield from compare(cluster, progress, nbytes, own)


def compare(
    cluster: Cluster, progress: Progress, nbytes: int, own: Sequence[str] = ()
) -> Iterator[Report]:
    """Measures every codec in rounds, for so many bytes of fp32 values on each of four engines.

    Codecs of one's own, "module:attribute" or entry points, run without error feedback.
    """
    names: tuple[CodecName, ...] = get_args(CodecName)
    codecs: Codecs = {name: Codec(name=name) for name in names}
    others: list[OwnCodec] = [as_codec(name) for name in own]
    codecs |= {codec.name: codec.replace(error_feedback=False) for codec in others}
    x = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(0))
    alone: Seconds = {name: {op: [] for op in TIMES} for name in codecs}
    traced: dict[str, list[float]] = {name: [] for name in codecs}
    module = nn.Linear(nbytes // 4 // FEATURES, FEATURES, bias=False)  # whose gradient is as large
    experiment = Experiment(
        plan=Plan.data_parallel(trace(module, input_shape=(module.in_features,)), RANKS),
        data="synthetic",
        batch_size=RANKS,
        optimizer=SGD(lr=0.01),
        steps=1,
    )
    turns = [
        Turn(name, Synchronous(algorithm="ring", codec=codec), warm=1, steps=1, alone=True)
        for name, codec in codecs.items()
    ]
    measure(codecs, x)  # warms up
    for _ in progress.each("rounds"):
        for name, seconds in measure(codecs, x).items():
            for op in TIMES:
                alone[name][op].append(seconds[op])
        ranks = take_turns(cluster, experiment, module, turns, 1)
        for name in codecs:
            traced[name].append(max(rank[name].coding_s() for rank in ranks))
        yield _report(codecs, alone, traced, nbytes)


def measure(codecs: Codecs, x: torch.Tensor) -> dict[str, dict[str, float]]:
    """The seconds of each codec's operations on the values in x, one after another, on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        out = torch.zeros(x.numel())
        seconds = {}
        for name, codec in codecs.items():
            coding = PieceCoding(coder_of(codec, x.device), x.device)
            (wire,) = coding.buffers([x.numel()])
            operations = {
                "encode": partial(coding.encode, x, wire),
                "add": partial(coding.add, wire, out),
                "decode": partial(coding.decode, wire, out),
            }
            seconds[name] = {op: _timed(operation) for op, operation in operations.items()}
        return seconds
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
        engines=RANKS,
    )
