"""A user's own data set, decoded and augmented by workers, against data that is drawn in place.

The same model trains on both, in turns. Images of the user's own data set are PNG bytes, which are
decoded and flipped at random whenever they are read. Speed is that of the steps behind the first,
in the median: workers have begun by then.
"""

import io
import statistics
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from workbench.bench.nets import INPUT_SHAPE, SmallVGG
from workbench.bench.plot import Bar, Chart
from workbench.bench.progress import Part, Progress
from workbench.bench.report import Cell, Figure, Report, engines_here
from workbench.client.cluster import Cluster
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Data, Experiment, Synthetic
from workbench.plan.experiment.task import TorchData
from workbench.plan.plans.plan import Plan

BATCH_SIZE, SAMPLES, CLASSES = 64, 512, 10
WITHOUT, WITH = "own data, no workers", "own data, a worker for each rank"
DRAWN = "synthetic data"


class Encoded(Dataset[tuple[Tensor, Tensor]]):
    """Noise as PNG files in memory.

    Args:
        length: the number of images.
    """

    def __init__(self, length: int) -> None:
        generator = np.random.default_rng(0)
        self._files = [_png(generator) for _ in range(length)]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with Image.open(io.BytesIO(self._files[index])) as image:
            pixels = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255 - 0.5)
        if torch.rand(()) < 0.5:
            pixels = pixels.flip(1)
        return pixels.permute(2, 0, 1), torch.tensor(index % CLASSES)


def run(progress: Progress, *, quick: bool) -> Iterator[Report]:
    """Trains on each in turn, in several rounds; `quick` in one, for few steps."""
    module = SmallVGG(width=8 if quick else 32)
    graph = trace(module, input_shape=INPUT_SHAPE, num_classes=CLASSES)
    own = Encoded(SAMPLES)
    data: dict[str, Data] = {
        DRAWN: Synthetic(samples=SAMPLES, classes=CLASSES),
        WITHOUT: TorchData(train=own),
        WITH: TorchData(train=own, workers=1),
    }
    speeds: dict[str, list[float]] = {name: [] for name in data}
    progress.begin(Part("rounds", 1 if quick else 5, 20 if quick else 40))
    engines = engines_here()
    with Cluster(engines, timeout=300.0) as cluster:
        for _ in progress.each("rounds"):
            for name, each in data.items():
                experiment = Experiment(
                    plan=Plan.hybrid(graph, engines),
                    data=each,
                    batch_size=BATCH_SIZE,
                    optimizer=SGD(lr=1e-3),
                    steps=4 if quick else 40,
                    trace_every=0,
                )
                rows = cluster.train(experiment).wait().rows
                speeds[name].append(
                    statistics.median(row["samples_per_s"] for row in rows if row["step"] > 0)
                )
            yield _report(graph.source.name, engines, speeds)


def _report(model: str, engines: int, speeds: Mapping[str, Sequence[float]]) -> Report:
    figures = {
        "with_workers": _ratio(speeds[WITH], speeds[DRAWN]),
        "without_workers": _ratio(speeds[WITHOUT], speeds[DRAWN]),
    }
    table: list[dict[str, Cell]] = [
        {"data": name, "samples/s": statistics.median(found)} for name, found in speeds.items()
    ]
    bars = tuple(
        Bar(name, figure.median, figure.min, figure.max, ours=name == WITH)
        for name, figure in zip((WITH, WITHOUT), figures.values(), strict=True)
    )
    notes = (
        f"{model} on {engines} engines, batches of {BATCH_SIZE}, {CLASSES} classes of "
        f"32 x 32 images. Where there are as many engines as cores, workers take time from these.",
    )
    charts = (Chart("samples per second, of those on synthetic data", bars, target=0.95),)
    return Report("loading", tuple(table), figures, notes, charts, engines=engines)


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> Figure:
    return Figure.of([mine / other for mine, other in zip(ours, theirs, strict=True)])


def _png(generator: np.random.Generator) -> bytes:
    content = io.BytesIO()
    pixels = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()
