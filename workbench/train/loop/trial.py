"""What is tried before the first step: a user's own loss and metrics, and fp16."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from workbench.plan.errors import ExperimentError
from workbench.plan.graph import Graph
from workbench.train.data.feed import as_wide
from workbench.train.data.opening import Dataset, order_seed
from workbench.train.data.reading import DataError

ROWS = 64
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
        """Reads some samples.

        Args:
            graph: the model, whose outputs are meant.
            data: the data set that the samples are from.
            device: the device of outputs and targets.
            dtype: the type of outputs.
        """
        rows = min(ROWS, len(data))
        # Data sets are often sorted by class; but what is only iterated shall not be read whole.
        spread = 1 if order_seed(data, 0) is None else len(data) / rows
        _, targets = data.batch((torch.arange(rows) * spread).long())
        generator = torch.Generator().manual_seed(0)
        shapes = [(graph[name].rows * rows, *graph[name].output_shape) for name in graph.outputs]
        drawn = [torch.rand(shape, generator=generator, dtype=dtype) for shape in shapes]
        outputs = tuple((0.05 + 0.9 * output).to(device) for output in drawn)
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

    def check_classes(self, *, per_token: bool = False) -> None:
        """Tries cross-entropy, on the CPU: on a GPU a class that is not there ends the process.

        Args:
            per_token: whether scores are those of tokens, [rows, tokens, classes].

        Raises:
            DataError: the targets are none of cross-entropy's.
        """
        scores, labels = self.outputs[0], self.targets
        classes = scores.shape[-1 if per_token else 1]
        try:
            if per_token:
                scores, labels = scores.flatten(0, -2), labels.flatten()
            F.cross_entropy(scores, labels)
        except Exception as error:  # of many kinds
            raise DataError(
                f"cross-entropy fails for {self}: {error}; it takes the numbers of classes, 0 to "
                f"{classes - 1}, and loss= a function for other targets"
            ) from error

    def _span(self, output: Tensor, begin: int, end: int) -> Tensor:
        each = len(output) // self.rows
        return output[begin * each : end * each]

    def __str__(self) -> str:
        shapes = " and ".join(str(tuple(output.shape)) for output in self.outputs)
        return f"outputs of shape {shapes} and the targets of {self.rows} samples"


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
