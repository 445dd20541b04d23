"""Losses as people write them, for the library and for one process alike."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle.oracle import of_labels
from workbench.plan.experiment.experiment import CrossEntropy, Loss, Metric

Given = Tensor | tuple[Tensor, ...]
HEADS = 0.5
"""Of every output but the first."""


@dataclass(frozen=True)
class Own:
    """A loss, and what one process needs to know of it.

    Attributes:
        value: what the experiment gets.
        mean: of some rows, each by its weight.
        share: (labels of some rows, labels of the batch) -> what their mean counts in the batch's.
        ignored: the label that counts neither in it nor in the accuracy, which has no metric then.
        make: makes the function for a model, instead of value and mean; None: these are there.
    """

    value: Loss | CrossEntropy | None
    mean: Callable[[Given, Tensor], Tensor]
    share: Callable[[Tensor, Tensor], float]
    ignored: int | None = None
    make: Callable[[nn.Module], Any] | None = None

    def for_experiment(self, model: nn.Module) -> Loss | CrossEntropy | None:
        return self.value if self.make is None else Loss(self.make(model))

    def for_one_process(self, model: nn.Module) -> Callable[[Given, Tensor], Tensor]:
        if self.make is None:
            return self.mean
        function = self.make(model)
        return lambda outputs, labels: function(outputs, labels).mean()


def rows_of(outputs: Given, labels: Tensor, **options: float) -> Tensor:
    """Cross-entropy of each row [rows], the mean over its labels; of all outputs."""
    first, *heads = (outputs,) if isinstance(outputs, Tensor) else outputs
    found = _of_output(first, labels, **options)
    for head in heads:
        found = found + HEADS * _of_output(head, labels, **options)
    return found


def _of_output(logits: Tensor, labels: Tensor, **options: float) -> Tensor:
    each = F.cross_entropy(*of_labels(logits, labels), reduction="none", **options)
    return each.unflatten(0, (len(labels), -1)).mean(1)


def smoothed(outputs: Given, labels: Tensor) -> Tensor:
    """A number: the mean over the rows."""
    return rows_of(outputs, labels, label_smoothing=0.1).mean()


def focal(outputs: Given, labels: Tensor) -> Tensor:
    """A number for each row."""
    plain = rows_of(outputs, labels)
    return (1 - (-plain).exp()) ** 2 * plain


def weights(labels: Tensor) -> Tensor:
    """Rows of class 0 are left out, the others weigh unequally."""
    first = labels if labels.ndim == 1 else labels[:, 0]
    return torch.tensor([0.0, 1.0, 2.5], dtype=torch.float64)[first % 3]


def weighed(outputs: Given, labels: Tensor) -> Tensor:
    """The mean of some rows, as one process has it; of rows that are all left out, 0."""
    own, total = rows_of(outputs, labels), weights(labels)
    return (own * total).sum() / total.sum().clamp_min(1e-300)


def hits(outputs: Given, labels: Tensor) -> Tensor:
    """Three sums: labels whose class has the highest score, labels, and rows."""
    first = outputs if isinstance(outputs, Tensor) else outputs[0]
    scores, classes = of_labels(first, labels)
    right = (scores.argmax(1) == classes).sum()
    return torch.stack([right, right.new_tensor(len(classes)), right.new_tensor(len(labels))])


def share_of_hits(sums: Tensor) -> float:
    return (sums[0] / sums[1]).item()


ACCURACY = {"accuracy": Metric(hits, result=share_of_hits)}


def by_rows(some: Tensor, every: Tensor) -> float:
    return len(some) / len(every)


IGNORED, SMOOTHING, PART = 1, 0.2, 0.3
"""The label that is ignored, the smoothing, and the part of auxiliary heads."""


def unignored(outputs: Given, labels: Tensor, weight: Tensor | None = None) -> Tensor:
    """The mean over the labels that are not ignored; if there are none 0, with a gradient of 0."""
    every = (outputs,) if isinstance(outputs, Tensor) else outputs
    if (labels == IGNORED).all():
        return sum((logits[:0].sum() for logits in every), every[0].new_zeros(()))
    found, part = torch.zeros((), dtype=torch.float64), 1.0
    for logits in every:
        scores, classes = of_labels(logits, labels)
        options = {"ignore_index": IGNORED, "label_smoothing": SMOOTHING, "weight": weight}
        found, part = found + part * F.cross_entropy(scores, classes, **options), PART
    return found


def kept(some: Tensor, every: Tensor) -> float:
    """No number where nothing counts, as torch's mean over no labels."""
    mine, whole = ((labels != IGNORED).sum().double() for labels in (some, every))
    return (mine / whole).item()


WEIGHT = (0.5, 1.0, 2.0)


def of_classes(outputs: Given, labels: Tensor) -> Tensor:
    first = outputs if isinstance(outputs, Tensor) else outputs[0]
    return unignored(outputs, labels, first.new_tensor(WEIGHT))


def share_of_classes(some: Tensor, every: Tensor) -> float:
    mine, whole = (
        torch.tensor(WEIGHT).double()[labels][labels != IGNORED].sum() for labels in (some, every)
    )
    return (mine / whole).item()


LOSSES = {
    "smoothed": Own(Loss(smoothed), smoothed, by_rows),
    "summed": Own(
        Loss(focal, reduction="sum"), lambda o, y: focal(o, y).mean(), lambda some, _: len(some)
    ),
    "weighed": Own(
        Loss(rows_of, weights=weights),
        weighed,
        lambda some, every: (weights(some).sum() / weights(every).sum()).item(),
    ),
    "ignoring": Own(
        CrossEntropy(ignore_index=IGNORED, label_smoothing=SMOOTHING), unignored, kept, IGNORED
    ),
}
OF_CLASSES = {
    "of classes": Own(
        CrossEntropy(ignore_index=IGNORED, label_smoothing=SMOOTHING, weight=WEIGHT),
        of_classes,
        share_of_classes,
        IGNORED,
    )
}
"""Of models with three classes."""
