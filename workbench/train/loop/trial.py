"""What is tried before the first step: a user's own loss and metrics, and fp16."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from workbench.layers.loss import PLAIN
from workbench.plan.errors import ExperimentError
from workbench.plan.experiment.task import CrossEntropy
from workbench.plan.graph import Graph
from workbench.train.data.feed import as_wide
from workbench.train.data.opening import Dataset, order_seed
from workbench.train.data.reading import DataError
from workbench.train.loop.objective import check_labels

ROWS = 64
ELEMENTS = 2**22
"""Of outputs that are drawn at most, unless two rows have more: tokens' scores have many."""
_PAIRS = 8


@dataclass(frozen=True)
class Trial:
    """Targets from all over a data set, and outputs such as the model gives.

    Attributes:
        rows: how many samples.
        outputs: numbers between 0 and 1, which are valid as scores and as probabilities.
        targets: those of the samples.
    """

    rows: int
    outputs: tuple[Tensor, ...]
    targets: Any

    @classmethod
    def of(cls, graph: Graph, data: Dataset, device: torch.device, dtype: torch.dtype) -> "Trial":
        """Reads some samples; fewer of a model whose outputs are large, but two if it can.

        Args:
            graph: the model, whose outputs are meant.
            data: the data set that the samples are from.
            device: the device of outputs and targets.
            dtype: the type of outputs.
        """
        shapes = [(graph[name].rows, *graph[name].output_shape) for name in graph.outputs]
        fitting = ELEMENTS // max(1, sum(map(math.prod, shapes)))
        rows = min(len(data), max(2, min(ROWS, fitting)))
        targets = _targets(data, rows)
        generator = torch.Generator().manual_seed(0)
        drawn = [
            torch.rand((each * rows, *shape), generator=generator, dtype=dtype)
            for each, *shape in shapes
        ]
        outputs = tuple(output.mul_(0.9).add_(0.05).to(device) for output in drawn)
        targets = tree_map(lambda each: as_wide(each, dtype).to(device), targets)
        return cls(rows, outputs, targets)

    def cut(self, at: int) -> Iterator["Trial"]:
        """The rows up to this one, and the others; parts without rows are left out."""
        for begin, end in ((0, at), (at, self.rows)):
            if begin < end:
                outputs = tuple(self._span(output, begin, end) for output in self.outputs)
                own = tree_map(lambda each, b=begin, e=end: each[b:e], self.targets)
                yield Trial(end - begin, outputs, own)

    def pairs(self) -> Iterator["Trial"]:
        """Two rows each, of the first ones."""
        for begin in range(0, min(self.rows, 2 * _PAIRS) - 1, 2):
            *_, behind = self.cut(begin)
            yield next(behind.cut(2))

    def _span(self, output: Tensor, begin: int, end: int) -> Tensor:
        each = len(output) // self.rows
        return output[begin * each : end * each]

    def __str__(self) -> str:
        shapes = " and ".join(str(tuple(output.shape)) for output in self.outputs)
        return f"outputs of shape {shapes} and the targets of {self.rows} samples"


def check_classes(graph: Graph, data: Dataset, options: CrossEntropy = PLAIN) -> None:
    """Reads some samples, on the CPU: on a GPU a class that is not there ends the process.

    Args:
        graph: the model; all its outputs have these labels.
        data: the data set that they are from.
        options: which labels are ignored.

    Raises:
        DataError: the inputs are none that the model reads, or the targets none of cross-entropy's.
    """
    rows = min(ROWS, len(data))
    targets = _targets(data, rows)
    for name in graph.outputs:
        try:
            check_labels(graph, name, targets, options)
        except DataError as error:
            raise DataError(f"of {rows} samples that were tried: {error}") from None


def _targets(data: Dataset, rows: int) -> Any:
    """Targets of so many samples from all over a data set."""
    # Data sets are often sorted by class; but what is only iterated shall not be read whole.
    spread = 1 if order_seed(data, 0) is None else len(data) / rows
    return data.batch((torch.arange(rows) * spread).long())[1]


def try_fp16(module: nn.Module, device: torch.device) -> None:
    """Tries layers that not every processor computes in fp16: of oneDNN, those are LSTMs.

    Args:
        module: the model, with or without values.
        device: where it is to compute.

    Raises:
        ExperimentError: the device does not compute one; the text names the layer.
    """
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.LSTM):
            continue
        small = nn.LSTM(2, 2, proj_size=min(layer.proj_size, 1), device=device)
        try:
            with torch.autocast(device.type, torch.float16):
                small(torch.zeros(1, 1, 2, device=device))
        except RuntimeError as error:
            raise ExperimentError(
                f"precision: layer {name!r} is an LSTM, which this {device.type} does not compute "
                f"in fp16 ({error}); set precision='bf16' or 'fp32'"
            ) from error
