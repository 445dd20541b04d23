"""A hybrid VGG-11 on the digits, against one process: accuracy over seeds.

Both train torchvision's VGG-11 for the same steps on the same rows; they differ in their initial
weights' seed, and dropout draws other masks in each.
"""

from collections.abc import Iterator

from workbench.bench.harness.nets import INPUT_SHAPE, SmallVGG
from workbench.bench.harness.progress import Part, Progress
from workbench.bench.harness.report import Cell, Figure, Report
from workbench.client.cluster import Cluster
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import AdamW, Digits, Experiment
from workbench.plan.plans.plan import Plan

ENGINES, BATCH_SIZE, LEARNING_RATE = 4, 128, 1e-4
HYBRID, WHOLE = "hybrid, 4 engines", "one process"


def run(progress: Progress, *, quick: bool) -> Iterator[Report]:
    """Trains each system with three seeds; `quick` trains a narrow VGG with one, for five steps."""
    module = SmallVGG(width=8) if quick else None
    graph = trace(module or "vgg11", input_shape=INPUT_SHAPE, num_classes=10)
    plans = {
        HYBRID: Plan.hybrid(graph, ENGINES, ENGINES),
        WHOLE: Plan.data_parallel(graph, 1),
    }
    rows: list[dict[str, Cell]] = []
    accuracies: dict[str, list[float]] = {name: [] for name in plans}
    seeds = 1 if quick else 3
    progress.begin(*(Part(name, seeds, 10 if quick else 250) for name in plans))
    note = (
        f"{graph.source.name}, scikit-learn's digits at 32 x 32, batches of {BATCH_SIZE}, "
        f"AdamW at {LEARNING_RATE:g}."
    )
    for name in filter(progress.wants, plans):
        # One engine has all cores.
        with Cluster(plans[name].world_size, timeout=300.0) as cluster:
            for seed in progress.each(name):
                experiment = Experiment(
                    plan=plans[name],
                    data=Digits(),
                    batch_size=BATCH_SIZE,
                    optimizer=AdamW(lr=LEARNING_RATE),
                    steps=5 if quick else 200,
                    seed=seed,
                )
                ended = cluster.train(experiment, module=module).wait()
                accuracies[name].append(ended.evaluation["accuracy"])
                times = ended.metrics["time"]
                rows.append(
                    {
                        "system": name,
                        "seed": seed,
                        "steps": experiment.steps,
                        "accuracy": accuracies[name][-1],
                        "last loss": float(ended.metrics["loss"].iloc[-1]),
                        "seconds": float(times.max() - times.min()),
                    }
                )
                yield Report("accuracy", tuple(rows), _figures(accuracies), (note,))


def _figures(accuracies: dict[str, list[float]]) -> dict[str, Figure]:
    ours, theirs = accuracies[HYBRID], accuracies[WHOLE]
    samples = {
        "accuracy": ours,
        "accuracy_of_one_process": theirs,
        "accuracy_difference": [a - b for a, b in zip(ours, theirs, strict=False)],
    }
    return {name: Figure.of(values) for name, values in samples.items() if values}
