"""The loss of a step on whatever layout outputs have: cross-entropy, or the user's own.

For a loss of the user's own, outputs are brought to the ranks that have their rows, whole. There
it is a sum over rows, as in one process, whatever rows each rank and micro-batch has.

Before anybody else reads the running statistics of local batch norms, they are made one.
"""

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from workbench.comm.all_reduce import all_reduce
from workbench.comm.collectives import all_gather
from workbench.comm.groups.group import Group
from workbench.comm.regions import exchange, scatter_to
from workbench.layers.cut_model import CutModel
from workbench.layers.local.loss import (
    PLAIN,
    cross_entropy_sum,
    cut_cross_entropy_sum,
    highest_class,
    kept_labels,
    label_weights,
)
from workbench.layers.local.norms import LocalBatchNorm
from workbench.plan.experiment.task import CrossEntropy, Loss
from workbench.plan.extension.user_object import Own, OwnObjectError
from workbench.plan.graph.graph import Graph
from workbench.plan.placement.placement import ROWS, Shard
from workbench.train.data.copied import copied
from workbench.train.data.feed import MicroBatch
from workbench.train.data.reading import DataError

# Weight of an auxiliary head's loss, as in GoogLeNet (Szegedy et al. 2014, arXiv:1409.4842).
AUXILIARY_WEIGHT = 0.3

StepLoss = Callable[[CutModel, tuple[Tensor, ...], Any, float], tuple[Tensor, float]]
"""As `step_loss`."""


def step_loss(
    model: CutModel, outputs: tuple[Tensor, ...], labels: Tensor, total: float
) -> tuple[Tensor, float]:
    """This rank's part of the mean cross-entropy over the step's global batch.

    Ranks that hold the same rows compute the same loss; summed over the ranks of a replica
    group, the gradients are those of the mean.

    Args:
        outputs: what it returned; the first is the prediction, the others auxiliary heads.
        labels: a class for each place that the prediction scores [own rows, ...].
        total: the samples of the step over all ranks and micro-batches.

    Returns:
        The loss to differentiate, and the part of it to report: these add up over all ranks
        (and micro-batches) to the mean.
    """
    return _over_outputs(model, outputs, labels, total * math.prod(model.plan.graph.label_shape))


def _over_outputs(
    model: CutModel,
    outputs: tuple[Tensor, ...],
    labels: Tensor,
    total: float,
    options: CrossEntropy = PLAIN,
) -> tuple[Tensor, float]:
    """As `step_loss`; the total is what all labels count together."""
    loss_of_all, reported = outputs[0].new_zeros(()), 0.0
    for index, name in enumerate(model.plan.graph.outputs):
        weight = 1.0 if index == 0 else AUXILIARY_WEIGHT
        scores = Scores.of(model, name, outputs[index], labels, options)
        loss = weight * scores.cross_entropy() / total
        loss_of_all = loss_of_all + loss
        reported += loss.item() / model.plan.flow.returned(name).group_size
    return loss_of_all, reported


class CrossEntropyLoss:
    """Cross-entropy with options, on whatever layout the model's outputs have."""

    def __init__(self, options: CrossEntropy, graph: Graph, everyone: Group) -> None:
        self._options, self._everyone = options, everyone
        self._each = math.prod(graph.label_shape)

    def __call__(
        self, model: CutModel, outputs: tuple[Tensor, ...], labels: Tensor, total: float
    ) -> tuple[Tensor, float]:
        """As `step_loss`; the total is what the labels count, if they do so unequally."""
        every = total if self._options.weighs else total * self._each
        return _over_outputs(model, outputs, labels, every, self._options)

    def total(self, batches: Sequence[MicroBatch], rank: int) -> float:
        """What all labels of a step count, added up over the ranks; all of them call it."""
        targets = [batch.targets for batch in batches if batch.rows[rank]]
        mine = sum(label_weights(each, self._options).sum() for each in targets)
        weight = torch.tensor([float(mine)], dtype=torch.float64)
        return all_reduce(weight, self._everyone, layer="weights").item()


@dataclass(frozen=True)
class Scores:
    """Scores of classes as they lie, and the labels of the same rows.

    Attributes:
        logits: [labels, classes held here]; of whole classes [rows, classes, ...] as well.
        labels: [labels], or [rows, ...].
        classes: how the classes are cut over the group; None: they are whole.
        group: the ranks that hold scores of the same rows; None: only this one does.
    """

    logits: Tensor
    labels: Tensor
    classes: Shard | None
    group: Group | None
    layer: str
    options: CrossEntropy

    @classmethod
    def of(
        cls,
        model: CutModel,
        name: str,
        logits: Tensor,
        labels: Tensor,
        options: CrossEntropy = PLAIN,
    ) -> "Scores":
        """Those of one output; of rows that the group has together, labels are gathered.

        Raises:
            DataError: as `check_labels`.
        """
        graph, layout = model.plan.graph, model.plan.flow.returned(name)
        if layout == ROWS:
            return cls.whole(graph, name, logits, labels, options)
        check_labels(graph, name, labels, options)
        group = model.shard_group(layout.group_size)
        rows = model.context.group_rows(layout.group_size)
        every = all_gather(labels, rows, group, layer="labels")
        cut = layout.placement
        classes = Shard(1, cut.sizes) if isinstance(cut, Shard) else None
        return cls(*_of_places(graph, logits, every), classes, group, name, options)

    @classmethod
    def whole(
        cls,
        graph: Graph,
        name: str,
        logits: Tensor,
        labels: Tensor,
        options: CrossEntropy = PLAIN,
    ) -> "Scores":
        """Those of one output that lies whole with its rows.

        Raises:
            DataError: as `check_labels`.
        """
        check_labels(graph, name, labels, options)
        return cls(*_of_places(graph, logits, labels), None, None, name, options)

    def cross_entropy(self) -> Tensor:
        if self.classes is None or self.group is None:
            return cross_entropy_sum(self.logits, self.labels, self.options)
        return cut_cross_entropy_sum(
            self.logits, self.labels, self.classes, self.group, self.options, layer=self.layer
        )

    def counted(self) -> Tensor:
        """What the labels count, and how many are not ignored [2], float64."""
        weights, kept = label_weights(self.labels, self.options), self._kept
        return torch.stack([weights.sum(), kept.double().sum()])

    def hits(self) -> Tensor:
        """The labels whose class has the highest score [], a count; ignored ones are none."""
        if self.classes is None or self.group is None:
            best = self.logits.argmax(dim=1)
        else:
            best = highest_class(self.logits, self.classes, self.group, layer=self.layer)
        return ((best == self.labels) & self._kept).sum()

    @property
    def _kept(self) -> Tensor:
        return kept_labels(self.labels, self.options)

    @property
    def is_counted(self) -> bool:
        """Whether this rank counts in sums over ranks: one of those that have the same rows."""
        return self.group is None or self.group.rank == 0


def _of_places(graph: Graph, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and labels with classes in dimension 1: [labels, classes] where tokens have some."""
    labels = labels.long()  # of bytes, too: where classes are cut, logits are gathered by them
    if not graph.scores_tokens:
        return logits, labels
    return logits.flatten(0, -2), labels.flatten()


def check_labels(graph: Graph, name: str, labels: Any, options: CrossEntropy = PLAIN) -> None:
    """Checks that cross-entropy takes targets as the labels of an output; reads no scores.

    Args:
        labels: a class for each place that the output scores [rows, ...].

    Raises:
        DataError: they are no whole numbers of torch's default type, some place has none, or one is
            no class.
    """
    shape = graph[name].output_shape
    classes = shape[-1 if graph.scores_tokens else 0]
    taken = (
        f"cross-entropy takes the numbers of classes, 0 to {classes - 1}, as torch.int64, and "
        "loss= a function for other targets"
    )
    if not isinstance(labels, Tensor):
        raise DataError(f"targets are {type(labels).__name__}, no tensor of labels; {taken}")
    # torch takes bytes, too, where a row of scores has one label.
    flat = graph.scores_tokens or not graph.label_shape
    if labels.dtype != torch.int64 and not (flat and labels.dtype == torch.uint8):
        whole = not (labels.is_floating_point() or labels.is_complex())
        raise DataError(f"labels are {labels.dtype}; {taken}" + "; y.long() makes them" * whole)
    if labels.shape[1:] != graph.label_shape:
        raise DataError(
            f"layer {name!r} gives scores {shape} for each sample, whose labels are "
            f"{graph.label_shape}, got {tuple(labels.shape[1:])}; {taken}"
        )
    labels = labels[kept_labels(labels, options)]
    if not labels.numel():
        return
    least, most = (int(end) for end in torch.aminmax(labels))
    if least < 0 or most >= classes:
        raise DataError(
            f"label {least if least < 0 else most} is none of the {classes} classes that layer "
            f"{name!r} scores, 0 to {classes - 1}; to leave labels out, give "
            f"loss=CrossEntropy(ignore_index={least if least < 0 else most}), and for other "
            "targets loss= a function"
        )


def own_rows(model: CutModel, name: str, logits: Tensor) -> Tensor:
    """The output `name` of this rank's own rows, whole: [own rows, ...]."""
    layout = model.plan.flow.returned(name)
    if layout == ROWS:
        return logits
    group = model.shard_group(layout.group_size)
    rows = model.context.group_rows(layout.group_size, model.plan.graph[name].rows)
    if isinstance(layout.placement, Shard):
        return exchange(logits, layout.placement, rows, group, layer=name)
    return scatter_to(logits, rows, group, layer=name)


def average_statistics(model: CutModel) -> None:
    """Gives all ranks that hold the same channels the world's running means and variances.

    Under `batch_norm="local"` each rank has seen other rows, and keeps statistics of its own. The
    world's are what one process would keep that normalizes the ranks' rows apart: in every
    training pass (a micro-batch) they move by the mean over the parts, each weighted by its
    rows, and `num_batches_tracked` counts the pass once. So a part's variance is weighted, not
    the distance between its mean and the others': as under torch's DDP, that is no part of it.

    When this is called changes nothing but the rounding: a run that is resumed, or re-cut, goes on
    as one that is left alone, and to the bit as one that has saved after the same steps. Where
    nothing was seen since the last call, in eval mode, and with "synchronized", nothing moves.

    Every rank calls it after the same step.
    """
    pieces = model.pieces()
    with torch.no_grad():
        for path, norm in model.traced.named_modules():
            share = norm.share if isinstance(norm, LocalBatchNorm) else None
            if share is None or share.value is None:
                continue
            apart = model.plan.world_size // share.group_size
            for name in (f"{path}.running_mean", f"{path}.running_var"):
                if apart == 1 or name not in pieces:
                    continue
                placed = model.placements[name]
                group = model.replica_group(placed.group_size)
                # Of the ranks that hold this piece, as many as this have seen the same rows.
                alike = share.group_size // placed.group_size
                part = pieces[name] * (share.value / alike)
                pieces[name].copy_(all_reduce(part, group, layer="statistics"))
            share.value = None


Look = Callable[[Graph, tuple[Tensor, ...], Any, int], None]
"""(model, its outputs for some rows, their targets, how many rows) -> None; may raise."""


@dataclass(frozen=True)
class Seen:
    """The range in which a loss was tried.

    Attributes:
        losses: the least and the largest loss of a row, or of the fewest rows that were tried.
        by_row: whether the loss is a value for each row, and not one number for all.
    """

    outputs: tuple[float, float]
    losses: tuple[float, float]
    by_row: bool = False

    def joined(self, other: "Seen | None") -> "Seen":
        if other is None:
            return self
        outputs, losses = _joined(self.outputs, other.outputs), _joined(self.losses, other.losses)
        return Seen(outputs, losses, self.by_row and other.by_row)

    def __str__(self) -> str:
        return (
            f"outputs from {self.outputs[0]:.3g} to {self.outputs[1]:.3g}, losses from "
            f"{self.losses[0]:.3g} to {self.losses[1]:.3g}"
        )


class OwnLoss:
    """A loss as a sum over rows, by a copy of the user's function.

    Args:
        everyone: all ranks, which add up the weights of rows; None: it is only tried here.
        dtype: the type of outputs; a module's own tensors get it.
        held: the memory of the model's own tensors, of which there are no copies.

    Attributes:
        is_mean: whether the sum over rows is divided by their number, or their weights.
        fresh: makes another one, which remembers nothing of this one's calls; it takes `held`.
        look: what looks at each call; None: nothing does.
        seen: the range in which it was tried; None: it was not.
        by_row: whether the last call gave a loss for each row, and not one number.

    Raises:
        OwnObjectError: it cannot be loaded, or has parameters of its own to train.
    """

    def __init__(
        self,
        value: Loss,
        everyone: Group | None,
        device: torch.device,
        dtype: torch.dtype,
        held: Container[int] = (),
    ) -> None:
        self.name, self.is_mean, self._everyone = str(value.function), value.is_mean, everyone
        self.fresh = partial(OwnLoss, value, None, device, dtype)
        self._function = self._loaded(value.function, device, dtype, held)
        self._weights = None if value.weights is None else copied(value.weights.loaded, held)
        self.look: Look | None = None
        self.seen: Seen | None = None
        self.by_row = False

    @property
    def functions(self) -> tuple[Any, ...]:
        """The user's own: the loss, and what weighs rows, if anything does."""
        return (self._function,) if self._weights is None else (self._function, self._weights)

    def __call__(
        self, model: CutModel, outputs: tuple[Tensor, ...], targets: Any, total: float
    ) -> tuple[Tensor, float]:
        """As `step_loss`; the total is that of the rows' weights, where they have some."""
        context = model.context
        named = zip(model.plan.graph.outputs, outputs, strict=True)
        mine = tuple(own_rows(model, name, output) for name, output in named)
        rows = context.rows[context.rank]
        nothing = sum((output[:0].sum() for output in mine), outputs[0].new_zeros(()))
        if rows == 0:  # a function of no rows need not be defined; its gradient is zero
            return nothing, 0.0
        if self.look is not None:
            self.look(model.plan.graph, mine, targets, rows)
        found = self.summed(model.plan.graph.arranged(mine), targets, rows)
        found = found / total if self.is_mean else found
        # Of rows that are all left out it may be a constant: other ranks wait for its gradient.
        return found if found.requires_grad else found + nothing, found.item()

    def total(self, batches: Sequence[MicroBatch], rank: int) -> float:
        """The weights of all rows of a step, added up over the ranks; all of them call it."""
        given = [(batch.targets, batch.rows[rank]) for batch in batches]
        mine = sum(self.weight(targets, rows) for targets, rows in given if rows)
        weight = torch.tensor([mine], dtype=torch.float64)
        assert self._everyone is not None
        return all_reduce(weight, self._everyone, layer="weights").item()

    def summed(self, outputs: Any, targets: Any, rows: int) -> Tensor:
        """The sum over these rows [], each times its weight.

        Raises:
            OwnObjectError: the function gives no number, and not one for each row.
        """
        found = self._function(tree_map(widened, outputs), targets)
        self.by_row = isinstance(found, Tensor) and found.ndim == 1
        if isinstance(found, Tensor) and found.shape == (rows,):
            return (found if self._weights is None else found * self._of_rows(targets, rows)).sum()
        if isinstance(found, Tensor) and found.ndim == 0 and self._weights is None:
            return found * rows if self.is_mean else found
        given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        one = "one number, or one" if self._weights is None else "with weights one number"
        raise OwnObjectError(
            f"loss {self.name} gives {one} for each row, shape ({rows},) for {rows} rows, "
            f"got {given}"
        )

    def weight(self, targets: Any, rows: int) -> float:
        """What the sum over these rows is divided by, for their loss."""
        if not self.is_mean:
            return 1.0
        return rows if self._weights is None else self._of_rows(targets, rows).sum().item()

    def of_all(self, total: float, weight: float) -> float:
        """The loss of rows whose sums and weights add up to these."""
        return total / weight if self.is_mean else total

    def _loaded(
        self, given: Own, device: torch.device, dtype: torch.dtype, held: Container[int]
    ) -> Any:
        function = copied(given.loaded, held)
        if isinstance(function, type):
            raise OwnObjectError(f"loss {self.name} is a class: give an object of it")
        if not isinstance(function, nn.Module):
            return function
        if any(parameter.requires_grad for parameter in function.parameters()):
            raise OwnObjectError(
                f"loss {self.name} has parameters of its own, which nothing would train: make them "
                "part of the model, or set requires_grad to False"
            )
        return function.to(device, dtype)

    def _of_rows(self, targets: Any, rows: int) -> Tensor:
        assert self._weights is not None
        found = self._weights(targets)
        if not isinstance(found, Tensor) or found.shape != (rows,):
            given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise OwnObjectError(
                f"the weights of loss {self.name} are one number for each row, ({rows},) for "
                f"{rows} rows, got {given}"
            )
        return found


def _joined(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    return min(first[0], second[0]), max(first[1], second[1])


def widened(output: Tensor) -> Tensor:
    """An output as losses get it: half precision as single."""
    return output.float() if output.dtype in (torch.bfloat16, torch.half) else output
