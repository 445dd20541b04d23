"""What one process computes: the original module, whole, to hold a split one against.

Only two things are not torch's own. What is drawn at random depends on the places of its
elements (`verify/draws.py`). And where batch norm is local, its rows are normalized in the same
parts as the plan's ranks do (`verify/parted_norm.py`).
"""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from workbench.layers.context import BatchContext
from workbench.model.build import build_fake
from workbench.model.slices import WeightsFile
from workbench.plan.experiment import Experiment
from workbench.plan.graph import Graph
from workbench.plan.plan import Plan
from workbench.train.data.data import open_data, rows_of_step
from workbench.train.loop.evaluate import NO_STEP
from workbench.train.loop.objective import AUXILIARY_WEIGHT, RowLoss, row_losses
from workbench.train.strategies.optimizer import build_optimizer, entry, state_names
from workbench.train.verify.draws import VerifyError, place_draws
from workbench.train.verify.parted_norm import part_batch_norm
from workbench.train.verify.vary import vary


def whole_model(graph: Graph, weights: Path, dtype: torch.dtype) -> nn.Module:
    """The module that the graph was traced from, with every tensor under all its names.

    It is in training mode, but for the parts that are in eval mode while it trains.

    Args:
        graph: the traced model.
        weights: the file of its values.
        dtype: of floating-point weights.
    """
    model = build_fake(graph.source)
    reader = WeightsFile(weights)
    for weight in (weight for layer in graph.layers for weight in layer.weights):
        tensor = reader.read(weight.name)
        tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
        is_parameter = weight.trainable or weight.frozen
        value = nn.Parameter(tensor, requires_grad=weight.trainable) if is_parameter else tensor
        for name in (weight.name, *weight.aliases):
            path, _, leaf = name.rpartition(".")
            owner = model.get_submodule(path)
            table = owner._parameters if is_parameter else owner._buffers
            table[leaf] = value  # type: ignore[assignment]
    return model


T = TypeVar("T", bound=Tensor)


def write_reference(
    experiment: Experiment, weights: Path, start: Path, path: Path, loss: bytes | None = None
) -> None:
    """Trains the whole model for `experiment.steps` and writes what `verify` compares.

    Entries: `output/<i>` (first step, global batch), `gradient/<name>` (first step, where there
    is one), `weight/<name>`, `buffer/<name>` and `optimizer/<state>/<name>` after the last step,
    and `evaluation/loss` and `evaluation/accuracy` of the first test batch, where the prediction
    is a row of scores; for each of them its largest absolute value under `scale/<entry>`; and in
    fp32, under `rounding/<entry>`, the largest absolute difference from the same in fp64.

    Args:
        experiment: what to run.
        weights: the initial weights.
        start: where to write the weights that both models start from, which `vary` makes.
        path: where to write the entries.
        loss: a pickled `RowLoss`; None: cross-entropy, of auxiliary heads a part.

    Raises:
        VerifyError: the experiment computes something else by design.
    """
    if experiment.sync.inexact:
        raise VerifyError(
            f"{experiment.sync!r} is inexact by design ({experiment.sync.inexact}): one process "
            f"cannot confirm it; verify the plan under Synchronous()"
        )
    of_rows: RowLoss | None = None if loss is None else pickle.loads(loss)
    vary(experiment.plan.graph, weights, start)
    if experiment.precision == "fp64":
        found = _trained(experiment, start, torch.float64, of_rows)
        roundings = {}
    else:
        found = _trained(experiment, start, torch.float32, of_rows)
        exact = _trained(experiment, start, torch.float64, of_rows)
        roundings = {
            f"rounding/{name}": _largest(tensor.double() - exact[name].double())
            for name, tensor in found.items()
        }
    scales = {f"scale/{name}": _largest(tensor) for name, tensor in found.items()}
    save_file({name: t.contiguous() for name, t in (found | scales | roundings).items()}, path)


def _trained(
    experiment: Experiment, weights: Path, dtype: torch.dtype, of_rows: RowLoss | None
) -> dict[str, Tensor]:
    """What the whole model gives in the first step, and holds after the last."""
    plan = experiment.plan
    context = BatchContext(0, (0,), seed=experiment.seed)
    model = _whole(plan, plan.graph, weights, context, dtype)
    named = _Named(plan.graph)
    parameters = named(model.named_parameters())
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
        _loss(outputs, labels, of_rows).backward()
        if step == 0:
            found |= {f"output/{i}": out.detach().clone() for i, out in enumerate(outputs)}
            found |= {
                f"gradient/{name}": p.grad.clone()
                for name, p in parameters.items()
                if p.grad is not None
            }
        optimizer.step()
    found |= {f"weight/{name}": p.detach() for name, p in parameters.items()}
    found |= {f"buffer/{name}": b for name, b in named(model.named_buffers()).items()}
    found |= {
        entry(kind, name): optimizer.state[p].get(kind, _nothing(kind, p))
        for name, p in parameters.items()
        for kind in state_names(experiment.optimizer)
    }
    return found | _evaluated(experiment, model, weights, context, dtype)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    named = (model.named_parameters, model.named_buffers)
    return {name: t.detach() for of in named for name, t in of(remove_duplicate=False)}


def _whole(
    plan: Plan, mode: Graph, weights: Path, context: BatchContext, dtype: torch.dtype
) -> nn.Module:
    """The whole model, which draws as the layers of `mode` do: of training, or of evaluation."""
    model = whole_model(mode, weights, dtype)
    place_draws(model, mode, context)
    if plan.batch_norm == "local":
        part_batch_norm(model, plan)
    return model


class _Named:
    """Tensors by the names that the graph gives them; some have several."""

    def __init__(self, graph: Graph) -> None:
        weights = (weight for layer in graph.layers for weight in layer.weights)
        self._first = {alias: weight.name for weight in weights for alias in weight.aliases}

    def __call__(self, pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
        return {self._first.get(name, name): tensor for name, tensor in pairs}


def _loss(outputs: tuple[Tensor, ...], labels: Tensor, of_rows: RowLoss | None) -> Tensor:
    """The mean over the batch."""
    if of_rows is not None:
        return row_losses(of_rows, outputs, labels).mean()
    loss = F.cross_entropy(outputs[0], labels)
    for auxiliary in outputs[1:]:
        loss = loss + AUXILIARY_WEIGHT * F.cross_entropy(auxiliary, labels)
    return loss


def _nothing(kind: str, parameter: Tensor) -> Tensor:
    """What an optimizer remembers of a parameter that never had a gradient."""
    return torch.zeros(()) if kind == "step" else torch.zeros_like(parameter.detach())


def _evaluated(
    experiment: Experiment,
    model: nn.Module,
    weights: Path,
    context: BatchContext,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Loss and accuracy of the first test batch; the model is left in evaluation mode."""
    graph = experiment.plan.graph
    if len(graph[graph.outputs[0]].output_shape) != 1:
        return {}
    if graph.evaluation is not None:
        trained = _tensors(model)
        model = _whole(experiment.plan, graph.evaluation, weights, context, dtype)
        for name, tensor in _tensors(model).items():
            tensor.copy_(trained[name])
    data = open_data(experiment.data, graph.input_shape, graph.num_classes, "test")
    images, labels = data.batch(torch.arange(min(len(data), experiment.batch_size)))
    context.set((len(labels),), step=NO_STEP)
    model.eval()
    with torch.no_grad():
        scores = trained_on(model(images.to(dtype)))[0]
    right = (scores.argmax(dim=1) == labels).double().mean()
    return {
        "evaluation/loss": F.cross_entropy(scores, labels).double(),
        "evaluation/accuracy": right,
    }


def _largest(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return torch.zeros((), dtype=torch.float64)
    return (tensor.int() if tensor.dtype == torch.bool else tensor).abs().max().double()


def trained_on(outputs: object) -> tuple[Tensor, ...]:
    """The prediction and then the auxiliary heads.

    A traced module returns nothing else, and in this order; torchvision's in the same, with None
    for heads that it was built without.
    """
    given = (
        (outputs,) if isinstance(outputs, Tensor) else cast("tuple[Tensor | None, ...]", outputs)
    )
    return tuple(output for output in given if output is not None)
