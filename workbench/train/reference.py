"""What one process computes: the original module, whole, to hold a split one against.

Only two things are not torch's own. What is drawn at random depends on the places of its
elements (`train/masks.py`). And where batch norm is local, its rows are normalized in the same
parts as the plan's ranks do.
"""

from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from workbench.layers.context import BatchContext
from workbench.plan.experiment import Experiment
from workbench.plan.plan import Plan
from workbench.train.data import open_data, rows_of_step
from workbench.train.masks import VerifyError, place_draws
from workbench.train.objective import AUXILIARY_WEIGHT
from workbench.train.optimizer import build_optimizer
from workbench.train.vary import vary
from workbench.train.whole import whole_model


def write_reference(experiment: Experiment, weights: Path, start: Path, path: Path) -> None:
    """Trains the whole model for `experiment.steps` and writes what `verify` compares.

    Entries: `output/<i>` (first step, global batch), `gradient/<name>` (first step),
    `weight/<name>` and `buffer/<name>` after the last step; for each of them its largest
    absolute value under `scale/<entry>`; and in fp32, under `rounding/<entry>`, the largest
    absolute difference from the same in fp64.

    Args:
        experiment: what to run.
        weights: the initial weights.
        start: where to write the weights that both models start from, which `vary` makes.
        path: where to write the entries.

    Raises:
        VerifyError: the experiment computes something else by design.
    """
    if experiment.sync.inexact:
        raise VerifyError(
            f"{experiment.sync!r} is inexact by design ({experiment.sync.inexact}): one process "
            f"cannot confirm it; verify the plan under Synchronous()"
        )
    vary(experiment.plan.graph, weights, start)
    if experiment.precision == "fp64":
        found = _trained(experiment, start, torch.float64)
        roundings = {}
    else:
        found = _trained(experiment, start, torch.float32)
        exact = _trained(experiment, start, torch.float64)
        roundings = {
            f"rounding/{name}": _largest(tensor.double() - exact[name].double())
            for name, tensor in found.items()
        }
    scales = {f"scale/{name}": _largest(tensor) for name, tensor in found.items()}
    save_file({name: t.contiguous() for name, t in (found | scales | roundings).items()}, path)


def _trained(experiment: Experiment, weights: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the whole model gives in the first step, and holds after the last."""
    plan = experiment.plan
    model = whole_model(plan.graph, weights, dtype)
    context = BatchContext(0, (0,), seed=experiment.seed)
    place_draws(model, plan.graph, context)
    if plan.batch_norm == "local":
        _part_batch_norm(model, plan, experiment.batch_size)
    parameters = dict(model.named_parameters())
    optimizer = build_optimizer(experiment.optimizer, parameters.values())
    graph = plan.graph
    data = open_data(experiment.data, graph.input_shape, graph.num_classes, "train")
    found: dict[str, Tensor] = {}
    for step in range(experiment.steps):
        order = rows_of_step(len(data), experiment.batch_size, experiment.seed, step)
        images, labels = data.batch(order)
        context.set((len(order),), step=step)
        outputs = trained_on(model(images.to(dtype)))
        optimizer.zero_grad()
        loss = F.cross_entropy(outputs[0], labels)
        for auxiliary in outputs[1:]:
            loss = loss + AUXILIARY_WEIGHT * F.cross_entropy(auxiliary, labels)
        loss.backward()
        if step == 0:
            found |= {f"output/{i}": out.detach().clone() for i, out in enumerate(outputs)}
            found |= {
                f"gradient/{name}": torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for name, p in parameters.items()
            }
        optimizer.step()
    found |= {f"weight/{name}": p.detach() for name, p in parameters.items()}
    return found | {f"buffer/{name}": b for name, b in model.named_buffers()}


def _largest(tensor: Tensor) -> Tensor:
    return tensor.abs().max().double() if tensor.numel() else torch.zeros((), dtype=torch.float64)


def trained_on(outputs: object) -> tuple[Tensor, ...]:
    """The prediction and then the auxiliary heads.

    A traced module returns nothing else, and in this order; torchvision's in the same, with None
    for heads that it was built without.
    """
    given = (
        (outputs,) if isinstance(outputs, Tensor) else cast("tuple[Tensor | None, ...]", outputs)
    )
    return tuple(output for output in given if output is not None)


def _part_batch_norm(model: nn.Module, plan: Plan, batch_size: int) -> None:
    for layer in plan.graph.layers:
        if layer.kind != "batch_norm" or layer.shared:
            continue
        k = plan.flow.inputs[layer.name].group_size
        norm = model.get_submodule(layer.name)
        model.set_submodule(layer.name, _PartedBatchNorm(norm, plan, k, layer.rows))


class _PartedBatchNorm(nn.Module):
    """Normalizes the rows of each group of `group_size` ranks by themselves."""

    def __init__(self, norm: nn.Module, plan: Plan, group_size: int, rows: int) -> None:
        super().__init__()
        self.plan, self.group_size, self.rows = plan, group_size, rows
        self.eps = cast(float, norm.eps)
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(norm, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))

    def forward(self, x: Tensor) -> Tensor:
        ranks = self.plan.rows_of(x.shape[0] // self.rows)
        groups = range(0, len(ranks), self.group_size)
        sizes = [self.rows * sum(ranks[first : first + self.group_size]) for first in groups]
        weight, bias = cast(Tensor, self.weight), cast(Tensor, self.bias)
        return torch.cat(
            [
                F.batch_norm(part, None, None, weight, bias, True, 0.0, self.eps)
                for part in x.split(sizes)
                if len(part)
            ]
        )
