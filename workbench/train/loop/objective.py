"""The loss of a step, on whatever layout the model's outputs have, and evaluation on a whole split.

Before anybody else reads the running statistics of local batch norms, they are made one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from workbench.comm.all_reduce import all_reduce
from workbench.comm.collectives import all_gather
from workbench.comm.groups.group import Group
from workbench.comm.regions import exchange, scatter_to
from workbench.layers.cut import evaluating
from workbench.layers.cut_model import CutModel
from workbench.layers.loss import cross_entropy_sum, cut_cross_entropy_sum
from workbench.layers.norms import LocalBatchNorm
from workbench.plan.placement.layout import ROWS
from workbench.plan.placement.placement import Shard
from workbench.train.datasets import Dataset

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
        model: the cut model; its context describes the batch in hand.
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


# Where random numbers follow from the step, evaluations are none.
NO_STEP = -1


def evaluate(
    model: CutModel,
    data: Dataset,
    batch_size: int,
    world: Group,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, float]:
    """{"loss", "accuracy"} over every sample of `data`, the same on all ranks.

    The model is cut as in training and keeps its placements. What it draws at random even then,
    it draws alike in every evaluation.
    """
    average_statistics(model)
    model.eval()
    whole = evaluating(model).eval()
    prediction = whole.plan.graph.outputs[0]
    totals = torch.zeros(2, dtype=torch.float64)
    with torch.inference_mode():
        for first in range(0, len(data), batch_size):
            count = min(batch_size, len(data) - first)
            rows = model.plan.rows_of(count)
            whole.context.set(rows, first_row=first, step=NO_STEP)
            start = first + sum(rows[: world.rank])
            images, labels = data.batch(torch.arange(start, start + rows[world.rank]))
            images, labels = images.to(device, dtype), labels.to(device)
            logits = own_rows(whole, prediction, whole(images)[0])
            totals[0] += cross_entropy_sum(logits, labels).item()
            totals[1] += (logits.argmax(dim=1) == labels).sum().item()
    model.train()
    totals = all_reduce(totals, world, layer="evaluation") / len(data)
    return {"loss": totals[0].item(), "accuracy": totals[1].item()}
