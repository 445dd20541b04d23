"""A user's own data set, decoded and augmented by workers, against data that is drawn in place.

The same model trains on both, in turns. Images of the user's own data set are PNG bytes, which are
decoded and flipped at random whenever they are read. Speed is the median of the steps behind the
first: workers have begun by then.
"""

import io
import statistics
from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from workbench.bench.harness.nets import INPUT_SHAPE, SmallVGG
from workbench.bench.harness.progress import Part, Progress
from workbench.bench.harness.report import Figure, Report, Row, engines_here
from workbench.client.cluster import Cluster
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Data, Experiment, Synthetic
from workbench.plan.experiment.task import TorchData
from workbench.plan.plans.plan import Plan

BATCH_SIZE, SAMPLES, CLASSES = 64, 512, 10
WITHOUT, WITH = "own data, no workers", "own data, a worker for each rank"
DRAWN = "synthetic data"


class Encoded(Dataset[tuple[Tensor, Tensor]]):
    """Noise as so many PNG files in memory."""

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


def _png(generator: np.random.Generator) -> bytes:
    content = io.BytesIO()
    pixels = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def run(progress: Progress, *, quick: bool) -> Iterator[Report]:
    """Trains on each in turn, in several rounds; `quick` in one, for few steps."""
    graph = trace(SmallVGG(width=8 if quick else 32), input_shape=INPUT_SHAPE, num_classes=CLASSES)
    own = Encoded(SAMPLES)
    sets: dict[str, Data] = {
        DRAWN: Synthetic(samples=SAMPLES, classes=CLASSES),
        WITHOUT: TorchData(train=own),
        WITH: TorchData(train=own, workers=1),
    }
    speeds: dict[str, list[float]] = {name: [] for name in sets}
    progress.begin(Part("rounds", 1 if quick else 5, 20 if quick else 40))
    engines = engines_here()
    note = (
        f"{graph.source.name} on {engines} engines, batches of {BATCH_SIZE}, {CLASSES} classes of "
        f"32 x 32 images. Where there are as many engines as cores, workers take time from these."
    )
    with Cluster(engines, timeout=300.0) as cluster:
        for _ in progress.each("rounds"):
            for name, data in sets.items():
                experiment = Experiment(
                    plan=Plan.hybrid(graph, engines),
                    data=data,
                    batch_size=BATCH_SIZE,
                    optimizer=SGD(lr=1e-3),
                    steps=4 if quick else 40,
                    trace_every=0,
                )
                rows = cluster.train(experiment).wait().rows
                speeds[name].append(
                    statistics.median(row["samples_per_s"] for row in rows if row["step"] > 0)
                )
            table: list[Row] = [
                {"data": name, "samples/s": statistics.median(taken)}
                for name, taken in speeds.items()
            ]
            figures = {
                "with_workers": Figure.ratio(speeds[WITH], speeds[DRAWN]),
                "without_workers": Figure.ratio(speeds[WITHOUT], speeds[DRAWN]),
            }
            yield Report("loading", tuple(table), figures, (note,), engines=engines)
