"""What is tried before the first step: a user's own loss and metrics, and fp16."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from workbench.layers.local.loss import PLAIN
from workbench.plan.experiment.task import CrossEntropy
from workbench.plan.graph.graph import Graph
from workbench.plan.io.errors import ExperimentError
from workbench.train.data.feed import as_wide
from workbench.train.data.opening import Dataset, order_seed
from workbench.train.data.own_samples import OwnSamples
from workbench.train.data.reading import DataError
from workbench.train.loop.objective import check_labels

ROWS = 64
ELEMENTS = 2**22
"""Of outputs that are drawn at most, unless two rows have more: tokens' scores have many."""


@dataclass(frozen=True)
class Trial:
    """Targets from all over a data set, and outputs such as the model gives.

    Attributes:
        graph: the model, whose outputs are meant.
        rows: how many samples.
        outputs: numbers between 0 and 1, which are valid as scores and as probabilities.
        targets: those of the samples.
        collated: the targets from one sample to before another, by the user's own collate function,
            which may pad them to the longest; None: they are rows of the targets.
    """

    graph: Graph
    rows: int
    outputs: tuple[Tensor, ...]
    targets: Any
    collated: Callable[[int, int], Any] | None = None

    @classmethod
    def of(
        cls,
        graph: Graph,
        data: Dataset,
        device: torch.device,
        dtype: torch.dtype,
        batch_size: int = ROWS,
    ) -> "Trial":
        """Reads some samples; fewer of a model whose outputs are large, but two if it can.

        Their targets come again where a batch has more.

        Args:
            graph: the model, whose outputs are meant.
            data: the data set that the samples are from.
            device: the device of outputs and targets.
            dtype: the type of outputs.
            batch_size: how many rows a step of one process has.
        """
        shapes = [(graph[name].rows, *graph[name].output_shape) for name in graph.outputs]
        most = ELEMENTS // max(1, sum(map(math.prod, shapes)))
        own = data if isinstance(data, OwnSamples) and data.collates else None
        rows = min(len(data), max(2, min(ROWS if own else max(ROWS, batch_size), most)))
        generator = torch.Generator().manual_seed(0)
        drawn = [
            torch.rand((each * rows, *shape), generator=generator, dtype=dtype)
            for each, *shape in shapes
        ]
        outputs = tuple(output.mul_(0.9).add_(0.05).to(device) for output in drawn)

        def moved(targets: Any) -> Any:
            return tree_map(lambda each: as_wide(each, dtype).to(device), targets)

        indices = _spread(data, min(rows, ROWS))
        if own is None:
            again = torch.arange(rows) % len(indices)
            targets = tree_map(lambda each: each[again], data.batch(indices)[1])
            return cls(graph, rows, outputs, moved(targets))
        samples, batch_of = own.read(indices), own.fitting

        def collated(begin: int, end: int) -> Any:
            return moved(batch_of(samples[begin:end])[1])

        return cls(graph, rows, outputs, collated(0, rows), collated)

    def cut(self, at: int) -> Iterator["Trial"]:
        """The rows up to this one, and the others; parts without rows are left out."""
        for begin, end in ((0, at), (at, self.rows)):
            if begin < end:
                yield self._part(begin, end)

    def _part(self, begin: int, end: int) -> "Trial":
        outputs = tuple(self._span(output, begin, end) for output in self.outputs)
        if self.collated is None:
            targets = tree_map(lambda each: each[begin:end], self.targets)
            return Trial(self.graph, end - begin, outputs, targets)
        collated = self.collated

        def later(first: int, last: int) -> Any:
            return collated(begin + first, begin + last)

        return Trial(self.graph, end - begin, outputs, collated(begin, end), later)

    def pairs(self, most: int) -> Iterator["Trial"]:
        """Two rows each, of so many pairs at most; of two rows, none."""
        for begin in range(0, min(self.rows, 2 * most) - 1 if self.rows > 2 else 0, 2):
            yield self._part(begin, begin + 2)

    @property
    def elements(self) -> int:
        """How many numbers all outputs have."""
        return sum(output.numel() for output in self.outputs)

    def drawn(self, generator: torch.Generator) -> "Trial":
        """Normal numbers for outputs."""
        outputs = (
            torch.randn(one.shape, generator=generator, dtype=one.dtype).to(one)
            for one in self.outputs
        )
        return replace(self, outputs=tuple(outputs))

    def scaled(self, factor: float) -> "Trial":
        """So many times the outputs."""
        return replace(self, outputs=tuple(factor * output for output in self.outputs))

    def beside(self, other: "Trial", at: int) -> "Trial":
        """The outputs of the rows up to this one, and another trial's of those after it."""
        pairs = zip(self.outputs, other.outputs, strict=True)
        outputs = (
            torch.cat([self._span(one, 0, at), self._span(two, at, self.rows)])
            for one, two in pairs
        )
        return replace(self, outputs=tuple(outputs))

    def towards(self, other: "Trial") -> "Trial":
        """From row to row, outputs that lead from these to another trial's."""

        def between(one: Tensor, two: Tensor) -> Tensor:
            ramp = torch.linspace(0, 1, len(one), dtype=one.dtype, device=one.device)
            return one + ramp.view(-1, *[1] * (one.ndim - 1)) * (two - one)

        return replace(self, outputs=tuple(map(between, self.outputs, other.outputs)))

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
    targets = data.batch(_spread(data, rows))[1]
    for name in graph.outputs:
        try:
            check_labels(graph, name, targets, options)
        except DataError as error:
            raise DataError(f"of {rows} samples that were tried: {error}") from None


def _spread(data: Dataset, rows: int) -> Tensor:
    """The indices of so many samples from all over a data set; of a stream, of the first."""
    # Data sets are often sorted by class; but what is only iterated shall not be read whole.
    spread = 1 if order_seed(data, 0) is None else len(data) / rows
    return (torch.arange(rows) * spread).long()


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
