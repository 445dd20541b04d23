"""A language model sharded by heads, MLPs and vocabulary, against torch's tensor parallelism.

    workbench             `Plan.hybrid`: attention by heads, MLPs in pairs, table and scores
                          sharded; between sharded layers each rank has its own rows of the batch,
                          or, with tokens divided, some tokens of all rows
    torch TP              DTensor, loss over the sharded vocabulary, everything else on every rank
    torch TP + sequence   the same with sequence parallelism
    torch DDP             the whole model on every rank
    one process           as many threads as there are engines, the same global batch
    one engine            one thread, a rank's part of the batch

There are as many engines as cores, or GPUs. All take the same rows of the same text from the same
weights, and their losses are equal. Systems that are compared run interleaved on the same engines:
each round has some steps of every system, which are built anew for it.

    tensor-parallel   torch TP, torch TP + sequence
    ddp               torch DDP, one engine and one process
    tokens            the workbench itself with tokens divided
    loss              the loss alone, of drawn scores that are sharded by the vocabulary, against
                      gathering them, regrouping them by rows, and torch's loss_parallel
    oversubscribed    as tensor-parallel, on four engines where there are fewer cores or GPUs
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from workbench.bench.harness.match import MEASURE_LOSSES, Match, Results, run_round
from workbench.bench.harness.nets import GPT
from workbench.bench.harness.progress import Part, Progress
from workbench.bench.harness.report import Cell, Devices, Figure, Report, engines_here
from workbench.client.cluster import Cluster
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment
from workbench.plan.graph.graph import Graph
from workbench.plan.plans.plan import Plan


@dataclass(frozen=True)
class Size:
    """The size of the model (`nets.GPT`), and of the work: rows of a rank, rounds, their steps."""

    blocks: int
    width: int
    tokens: int
    vocabulary: int
    rows: int
    rounds: int
    steps: int


FULL = Size(4, 256, 128, 4096, 8, 7, 3)
QUICK = Size(2, 128, 32, 512, 2, 2, 1)
CROWD = 4  # engines of the part "oversubscribed"
LOSS, OVERSUBSCRIBED = "loss", "oversubscribed"
MATCHES = {
    "tensor-parallel": (("language",), ("language sequence",)),
    "ddp": (("ddp 25",), ("alone",)),
    "tokens": (("divided",),),
    LOSS: (),
}
FIGURES = {
    "torch TP +": "throughput_vs_torch_sequence",
    "torch TP,": "throughput_vs_torch_tp",
    "torch DDP": "throughput_vs_ddp",
    "one engine": "speedup_over_one_engine",
    "one process": "throughput_vs_one_process",
    "workbench, tokens": "throughput_vs_divided_tokens",
    "scores gathered": "throughput_vs_gathered_scores",
    "scores by rows": "throughput_vs_scores_by_rows",
    "torch loss_parallel": "throughput_vs_loss_parallel",
}


def run(progress: Progress, *, quick: bool) -> Iterator[Report]:
    """Measures throughput, peak memory and losses; `quick` takes a small model and one step."""
    size, engines = QUICK if quick else FULL, engines_here()
    module = GPT(size.blocks, size.width, size.tokens, size.vocabulary)
    graph = trace(module, input_shape=(size.tokens,), vocabulary=size.vocabulary)
    matches = [Match(part, engines, rivals, 20) for part, rivals in MATCHES.items()]
    crowded = not quick and Devices.here().count < CROWD
    if crowded:
        matches.append(Match(OVERSUBSCRIBED, CROWD, MATCHES["tensor-parallel"], 40))
    progress.begin(
        *(Part(match.part, size.rounds, match.seconds) for match in matches),
        *([] if crowded else [Part(OVERSUBSCRIBED, 0, 0)]),  # named, it is no error
    )
    played: list[tuple[Match, Results]] = []
    wanted = [match for match in matches if progress.wants(match.part)]
    for count, alike in groupby(wanted, key=lambda match: match.engines):
        experiment = Experiment(
            plan=Plan.hybrid(graph, count),
            data="text",
            batch_size=size.rows * count,
            optimizer=SGD(lr=0.01, momentum=0.9),
            steps=1,
        )
        # One of its own: engines have their own cores only if there are no more of them.
        with Cluster(count, timeout=300.0) as cluster:
            for match in alike:
                played.append((match, Results()))
                for _ in progress.each(match.part):
                    if match.part == LOSS:
                        ranks = cluster.call(
                            MEASURE_LOSSES, experiment, module=module, steps=size.steps
                        )
                    else:
                        ranks = run_round(cluster, experiment, module, match.rivals, size.steps)
                    played[-1][1].add(ranks)
                    yield _report(graph, size, engines, played)


def _report(
    graph: Graph, size: Size, engines: int, played: Sequence[tuple[Match, Results]]
) -> Report:
    rows: list[dict[str, Cell]] = []
    figures: dict[str, Figure] = {}
    for match, results in played:
        of_match = results.rows(graph, match.engines, match.engines)
        rows += [{"part": match.part, **row} for row in of_match]
        end = "_oversubscribed" if match.part == OVERSUBSCRIBED else ""
        figures |= {f"{name}{end}": figure for name, figure in _figures(results).items()}
    return Report(
        "lm",
        tuple(rows),
        figures,
        (
            f"{size.blocks} blocks of {size.width} features, {size.tokens} tokens of "
            f"{size.vocabulary}, {graph.parameters:,} parameters; {engines} engines x 1 thread on "
            f"{Devices.here()}, {size.rows} rows per rank, SGD with momentum; interleaved rounds "
            f"of {size.steps} steps: median, range.",
            "Peak: live tensor bytes of one rank, from the first tensor to the second step; "
            "one engine and one process share their model.",
            "Loss: of the last step, on the sources of Python's standard library. All start alike "
            "and read the same rows. In the part of the loss alone samples are labels, scores are "
            f"drawn, as many as the model gives for a batch, and a turn is {size.steps} steps too.",
            "DTensor has no fused update: TP updates its sharded weights with foreach.",
        ),
        engines=engines,
    )


def _figures(results: Results) -> dict[str, Figure]:
    """Ratios of the workbench to every system that it ran with, and the worst gap of losses."""
    figures = {}
    for name, theirs in results.speeds.items():
        figure = next((f for start, f in FIGURES.items() if name.startswith(start)), "")
        if not figure:
            continue
        figures[figure] = Figure.ratio(results.speeds["workbench"], theirs)
        if not name.startswith("one "):
            share = results.peaks["workbench"] / results.peaks[name]
            figures[figure.replace("throughput", "peak_bytes")] = Figure.of([share])
            gap = abs(results.losses["workbench"] - results.losses[name])
            figures[figure.replace("throughput", "loss_gap")] = Figure.of([gap])
    return figures
