"""Evaluation of a cut model on a whole split."""

import torch

from workbench.comm.all_reduce import all_reduce
from workbench.comm.groups.group import Group
from workbench.layers.cut import evaluating
from workbench.layers.cut_model import CutModel
from workbench.train.data.feed import moved
from workbench.train.data.opening import Dataset
from workbench.train.loop.objective import average_statistics, own_rows
from workbench.train.loop.scoring import Scoring

# Where random numbers follow from the step, evaluations are none.
NO_STEP = -1


def evaluate(
    model: CutModel,
    data: Dataset,
    batch_size: int,
    world: Group,
    device: torch.device,
    dtype: torch.dtype,
    scoring: Scoring,
) -> dict[str, float]:
    """The figures over every sample of `data`, the same on all ranks.

    The model is cut as in training and keeps its placements. What it draws at random even then,
    it draws alike in every evaluation.
    """
    average_statistics(model)
    model.eval()
    whole = evaluating(model).eval()
    names = whole.plan.graph.outputs[: 1 if scoring.prediction_only else None]
    totals = torch.zeros(scoring.numel, dtype=torch.float64)
    # In inference mode torch decomposes no operation, and what it has instead of an LSTM ends the
    # process of a rank without rows.
    with torch.no_grad():
        for first in range(0, len(data), batch_size):
            count = min(batch_size, len(data) - first)
            rows = model.plan.rows_of(count)
            whole.context.set(rows, first_row=first, step=NO_STEP)
            start, own = first + sum(rows[: world.rank]), rows[world.rank]
            inputs, targets = moved(data.batch(torch.arange(start, start + own)), device, dtype)
            given = zip(names, whole(inputs), strict=False)
            outputs = tuple(own_rows(whole, name, output) for name, output in given)
            if own:
                totals += scoring.sums(outputs, targets, own)
    model.train()
    totals = all_reduce(totals, world, layer="evaluation")
    return scoring.figures(totals, len(data))
