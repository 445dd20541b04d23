"""The loss of a step, on whatever layout the model's outputs have."""

from collections.abc import Callable

from torch import Tensor

from workbench.comm.collectives import all_gather
from workbench.comm.regions import exchange, scatter_to
from workbench.layers.cut_model import CutModel
from workbench.layers.loss import cross_entropy_sum, cut_cross_entropy_sum
from workbench.plan.layout import ROWS
from workbench.plan.placement import Shard

# Weight of an auxiliary head's loss, as in GoogLeNet (Szegedy et al. 2014, arXiv:1409.4842).
AUXILIARY_WEIGHT = 0.3

StepLoss = Callable[[CutModel, tuple[Tensor, ...], Tensor, int], tuple[Tensor, float]]
"""As `step_loss`."""
RowLoss = Callable[..., Tensor]
"""(outputs, labels) -> one loss for each row [rows]; outputs are what the module returns: one
tensor, or a tuple of them."""


def step_loss(
    model: CutModel, outputs: tuple[Tensor, ...], labels: Tensor, batch_size: int
) -> tuple[Tensor, float]:
    """This rank's part of the mean cross-entropy over the step's global batch.

    Ranks that hold the same rows compute the same loss; summed over the ranks of a replica
    group, the gradients are those of the mean.

    Args:
        model: cut; its context describes the batch in hand.
        outputs: what it returned; the first is the prediction, the others auxiliary heads.
        labels: [own rows].
        batch_size: samples of the step over all ranks and micro-batches.

    Returns:
        The loss to differentiate, and the part of it to report: these add up over all ranks
        (and micro-batches) to the mean.
    """
    total, reported = outputs[0].new_zeros(()), 0.0
    for index, name in enumerate(model.plan.graph.outputs):
        weight = 1.0 if index == 0 else AUXILIARY_WEIGHT
        loss = weight * _output_loss(model, name, outputs[index], labels) / batch_size
        total = total + loss
        reported += loss.item() / model.plan.flow.returned(name).group_size
    return total, reported


def step_loss_of(of_rows: RowLoss) -> StepLoss:
    """The same for a loss of the user's own: its sum over all rows, divided by their number."""

    def loss(
        model: CutModel, outputs: tuple[Tensor, ...], labels: Tensor, batch_size: int
    ) -> tuple[Tensor, float]:
        named = zip(model.plan.graph.outputs, outputs, strict=True)
        own = tuple(own_rows(model, name, output) for name, output in named)
        if len(labels) == 0:  # a function of no rows need not be defined; its gradient is zero
            return sum((0.0 * output.sum() for output in own), outputs[0].new_zeros(())), 0.0
        total = row_losses(of_rows, own, labels).sum() / batch_size
        return total, total.item()

    return loss


def row_losses(of_rows: RowLoss, outputs: tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """One loss for each row, by a function of the user's own.

    Raises:
        ValueError: it gives something else.
    """
    found = of_rows(outputs[0] if len(outputs) == 1 else outputs, labels)
    if found.shape != labels.shape[:1]:
        raise ValueError(
            f"a loss gives one value for each row: shape {tuple(labels.shape[:1])} for "
            f"{len(labels)} rows, got {tuple(found.shape)} (reduction='none')"
        )
    return found


def _output_loss(model: CutModel, name: str, logits: Tensor, labels: Tensor) -> Tensor:
    layout = model.plan.flow.returned(name)
    if layout == ROWS:
        return cross_entropy_sum(logits, labels)
    group = model.shard_group(layout.group_size)
    rows = model.context.group_rows(layout.group_size)
    every = all_gather(labels, rows, group, layer="labels")
    if isinstance(layout.placement, Shard):
        return cut_cross_entropy_sum(logits, every, layout.placement, group, layer=name)
    return cross_entropy_sum(logits, every)


def own_rows(model: CutModel, name: str, logits: Tensor) -> Tensor:
    """The output `name` of this rank's own rows, all classes: [own rows, classes]."""
    layout = model.plan.flow.returned(name)
    if layout == ROWS:
        return logits
    group = model.shard_group(layout.group_size)
    rows = model.context.group_rows(layout.group_size)
    if isinstance(layout.placement, Shard):
        return exchange(logits, layout.placement, rows, group, layer=name)
    return scatter_to(logits, rows, group, layer=name)
