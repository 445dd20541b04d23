"""Part of `bench pipesgd`: every system on a gradient of AlexNet's size, interleaved.

    PS-Sync        gradients to one rank, weights back, during backward
    D-Sync         one ring all-reduce of the whole gradient after backward
    Pipe-SGD       the same, while the next step computes; with a codec in the ring
    torch DDP      buckets during backward; also with torch's hook that sends fp16

All use the same shaped links. The paper's headline, up to 5.4 times, is taken to be against a
parameter server, since no other comparison in the paper could give it.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from workbench.bench.nets import INPUT_SHAPE, SmallVGG
from workbench.bench.pipesgd.sweep import COMPUTE, ENGINES, QUEUE_S, take_turns
from workbench.bench.progress import Progress
from workbench.bench.report import Cell, Figure
from workbench.bench.rivals.turns import Seen, Turn
from workbench.client.cluster import Cluster
from workbench.hosts.emulated.hosts import Hosts
from workbench.model.tracing.trace import trace
from workbench.plan.collective.codec import Codec, CodecName
from workbench.plan.experiment.experiment import (
    SGD,
    Experiment,
    ParameterServer,
    Pipelined,
    Synchronous,
    Synthetic,
)
from workbench.plan.graph.graph import Graph
from workbench.plan.plans.plan import Plan
from workbench.predict.closed_form import ONCE

IMAGENET_CLASSES = 1000
CODECS: dict[CodecName, str] = {
    "fp16": "Pipe-SGD fp16",
    "bf16_truncated": "Pipe-SGD T",
    "int8": "Pipe-SGD Q",
}
"""The system with each codec; T and Q are the paper's."""


def _coded(codec: CodecName) -> Synchronous:
    """D-Sync's exchange through a codec."""
    return Synchronous(algorithm="ring", bucket_bytes=ONCE.bucket_bytes, codec=Codec(name=codec))


SYSTEMS = (
    Turn("compute", COMPUTE.runs, warm=1, steps=2),
    Turn("exchange", ONCE, warm=0, steps=1, alone=True),
    *(Turn(f"exchange, {codec}", _coded(codec), 1, 1, alone=True) for codec in CODECS),
    Turn("PS-Sync", ParameterServer(), warm=1, steps=1),
    Turn("D-Sync", ONCE, warm=1, steps=1),
    Turn("Pipe-SGD", Pipelined(algorithm="ring"), warm=2, steps=2),
    Turn(CODECS["fp16"], Pipelined(algorithm="ring", codec=Codec(name="fp16")), warm=2, steps=2),
    Turn(
        CODECS["bf16_truncated"],
        Pipelined(algorithm="ring", codec=Codec(name="bf16_truncated")),
        warm=2,
        steps=2,
    ),
    Turn(CODECS["int8"], Pipelined(algorithm="ring", codec=Codec(name="int8")), warm=2, steps=4),
    Turn("torch DDP", "rival ddp 25", warm=2, steps=1),
    Turn("torch DDP + fp16", "rival ddp 25 fp16", warm=2, steps=1),
)
RATIOS = {  # figure: (the slower, the faster)
    "pipe_vs_dsync": ("D-Sync", "Pipe-SGD"),
    "pipe_int8_vs_ps_sync": ("PS-Sync", "Pipe-SGD Q"),
    "pipe_int8_vs_dsync": ("D-Sync", "Pipe-SGD Q"),
    "pipe_vs_torch_ddp": ("torch DDP", "Pipe-SGD"),
    "pipe_vs_torch_ddp_fp16": ("torch DDP + fp16", "Pipe-SGD"),
    "pipe_fp16_vs_torch_ddp_fp16": ("torch DDP + fp16", "Pipe-SGD fp16"),
    "pipe_int8_vs_torch_ddp": ("torch DDP", "Pipe-SGD Q"),
    "pipe_int8_vs_torch_ddp_fp16": ("torch DDP + fp16", "Pipe-SGD Q"),
}


@dataclass(frozen=True)
class Headline:
    """The settings of the comparison.

    Attributes:
        model: the name of the model, "alexnet" or "small".
        input_shape: the shape of one sample, as small as the model permits, so that one core
            computes a step quickly.
        rate: the bandwidth of the links, in bytes/s.
        rounds: the number of interleaved rounds.
        rows: the rows of each rank in a step.
    """

    model: str = "alexnet"
    input_shape: tuple[int, int, int] = (3, 63, 63)
    rate: float = 125e6
    rounds: int = 5
    rows: int = 4


QUICK = Headline("small", INPUT_SHAPE, rate=12.5e6, rounds=1, rows=4)


@dataclass(frozen=True)
class Compared:
    """The rows and figures of the comparison, and the model that was trained."""

    rows: list[dict[str, Cell]]
    figures: dict[str, Figure]
    graph: Graph


def run(progress: Progress, headline: Headline) -> Iterator[Compared]:
    """Measures the seconds of a step of each system, and its bytes and coding time, in rounds."""
    module: nn.Module | None = SmallVGG(width=16) if headline.model == "small" else None
    classes = 10 if module else IMAGENET_CLASSES
    model = module or headline.model
    graph = trace(model, input_shape=headline.input_shape, num_classes=classes)
    experiment = Experiment(
        plan=Plan.data_parallel(graph, ENGINES),
        data=Synthetic(samples=64, classes=classes),
        batch_size=ENGINES * headline.rows,
        optimizer=SGD(lr=0.01, momentum=0.9),
        steps=1,
    )
    with (
        Hosts(ENGINES, bandwidth=headline.rate, queue_limit_s=QUEUE_S) as hosts,
        Cluster(ENGINES, hosts=hosts, timeout=300.0) as cluster,
    ):
        found: list[dict[str, Seen]] = []
        for _ in progress.each("headline"):
            round_ = take_turns(cluster, experiment, module, SYSTEMS, 1)
            for before, now in zip(found, round_, strict=False):  # none before the first
                for name, seen in now.items():
                    seen.seconds[:0] = before[name].seconds
            found = round_
            yield Compared(_rows(found), _figures(found), graph)


def _rows(found: list[dict[str, Seen]]) -> list[dict[str, Cell]]:
    return [
        {
            "system": name,
            "s of a step": statistics.median(one.seconds),
            "min": min(one.seconds),
            "max": max(one.seconds),
            "MB received, most": max(rank[name].received for rank in found) / 1e6,
            "coding, s": max(rank[name].coding_s() for rank in found),
        }
        for name, one in found[0].items()
    ]


def _figures(found: list[dict[str, Seen]]) -> dict[str, Figure]:
    seen = found[0]
    figures = {name: _ratio(seen, *pair) for name, pair in RATIOS.items()}
    plain = sum(rank["exchange"].received for rank in found)
    adding, seconds = found[0]["exchange"].coding_s(), seen["exchange"].seconds
    for codec in CODECS:
        name = f"exchange, {codec}"
        share = sum(rank[name].received for rank in found) / plain
        figures[f"bytes_{codec}_vs_fp32"] = Figure(share, share, share)
        coding = max(rank[name].coding_s() for rank in found) - adding
        figures[f"coding_{codec}_vs_exchange"] = Figure.of([coding / one for one in seconds])
    return figures


def _ratio(seen: Mapping[str, Seen], slower: str, faster: str) -> Figure:
    pairs = zip(seen[slower].seconds, seen[faster].seconds, strict=True)
    return Figure.of([a / b for a, b in pairs])
