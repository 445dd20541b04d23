"""VGG-11 with its classifier cut over all engines, against what one would use instead.

    workbench      convolutions replicated, linear layers cut over 4 engines
    torch DDP      the same engines; the best of several bucket sizes
    one process    as many threads as there are engines, the same global batch
    one engine     one thread, a rank's part of the batch

All in one run on the same engines, interleaved: each round runs some steps of every side.
"""

import statistics

from workbench.bench.interleaved import Measured
from workbench.bench.report import Figure, Report
from workbench.cluster.cluster import Cluster
from workbench.model.trace import trace
from workbench.plan.experiment import SGD, Experiment, Synthetic
from workbench.plan.plan import Plan

ENGINES = 4
ROWS = 32  # of a rank
MIB = 2**20


def run(*, quick: bool) -> Report:
    """Measures throughput and peak memory; `quick` takes AlexNet and fewer rounds."""
    model, shape = ("alexnet", (3, 64, 64)) if quick else ("vgg11", (3, 32, 32))
    rounds, steps = (2, 2) if quick else (7, 3)
    buckets = (25,) if quick else (1, 5, 25, 100)
    graph = trace(model, input_shape=shape, num_classes=10)
    experiment = Experiment(
        plan=Plan.hybrid(graph, ENGINES, ENGINES),
        data=Synthetic(samples=2048),
        batch_size=ROWS * ENGINES,
        optimizer=SGD(lr=0.01, momentum=0.9),
        steps=1,
    )
    with Cluster(ENGINES, timeout=300.0) as cluster:
        ranks: list[Measured] = cluster.call(
            "workbench.bench.interleaved:measure",
            experiment,
            rounds=rounds,
            steps=steps,
            buckets=buckets,
        )
    return _report(experiment, ranks, rounds)


def _report(experiment: Experiment, ranks: list[Measured], rounds: int) -> Report:
    first = ranks[0]
    speeds = {
        name: [first.samples[name] / seconds for seconds in first.seconds[name]]
        for name in first.samples
    }
    peaks = {name: max(rank.peak_bytes[name] for rank in ranks) for name in speeds}
    rows = [
        {
            "system": name,
            "samples/s": statistics.median(values),
            "min": min(values),
            "max": max(values),
            "peak MiB per rank": peaks[name] / MIB,
            "loss": sum(rank.losses.get(name, 0.0) for rank in ranks),
        }
        for name, values in speeds.items()
    ]
    ddp = next(name for name in speeds if name.startswith("torch DDP"))
    over = {
        "throughput_vs_ddp": ddp,
        "speedup_over_one_engine": "one engine",
        "throughput_vs_one_process": "one process",
    }
    figures = {
        figure: Figure.of([a / b for a, b in zip(speeds["workbench"], speeds[name], strict=True)])
        for figure, name in over.items()
    }
    ratio = peaks["workbench"] / peaks[ddp]
    figures["peak_bytes_vs_ddp"] = Figure(ratio, ratio, ratio)
    graph = experiment.plan.graph
    return Report(
        "splitbrain",
        tuple(rows),
        figures,
        (
            f"{graph.source.name}, {graph.parameters:,} parameters, "
            f"{'x'.join(map(str, graph.input_shape))} input, {ENGINES} engines x 1 thread, "
            f"{ROWS} rows per rank, SGD with momentum; {rounds} interleaved rounds: median, range.",
            "Peak: live tensor bytes of one rank, from the first tensor to the second step; "
            "one engine and one process share their model.",
            "Loss: of the last step. All start alike and read the same rows; dropout draws "
            "other masks in each system.",
        ),
    )
