"""Loss and accuracy of a cut model on a whole split."""

import torch

from workbench.comm.collectives import all_reduce
from workbench.comm.groups.group import Group
from workbench.layers.cut import evaluating
from workbench.layers.cut_model import CutModel
from workbench.layers.loss import cross_entropy_sum
from workbench.train.checkpoint.statistics import average_statistics
from workbench.train.data.data import Dataset
from workbench.train.loop.objective import own_rows

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
