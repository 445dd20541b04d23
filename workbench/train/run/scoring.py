"""Evaluations of a cut model on a whole split, and the figures that they report: made of sums."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from workbench.comm.all_reduce import all_reduce
from workbench.comm.groups.group import Group
from workbench.layers.cut import evaluating
from workbench.layers.cut_model import CutModel
from workbench.layers.local.loss import PLAIN
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.task import CrossEntropy, Metric
from workbench.plan.extension.user_object import OwnObjectError
from workbench.plan.graph.graph import Graph
from workbench.train.data.datasets import Dataset
from workbench.train.data.feed import moved
from workbench.train.step.loss import OwnLoss, Scores, average_statistics, own_rows
from workbench.train.step.trial import Trial

Outputs = tuple[Tensor, ...]

_LARGEST = 700.0  # of which a number has an exponential


class Score(Protocol):
    """One figure of an evaluation."""

    def sums(self, outputs: Outputs, targets: Any, rows: int) -> Tensor:
        """The sums over these rows that it is made of: one tensor, the same shape for any rows."""
        ...

    def figure(self, sums: Tensor, samples: int) -> float: ...


class MeanCrossEntropy:
    """The mean cross-entropy of the prediction, which is the first output."""

    def __init__(self, graph: Graph, options: CrossEntropy) -> None:
        self._graph, self._options = graph, options

    def sums(self, outputs: Outputs, targets: Any, rows: int) -> Tensor:
        name = self._graph.outputs[0]
        scores = Scores.whole(self._graph, name, outputs[0], targets, self._options)
        return torch.stack([scores.cross_entropy().double(), scores.counted()[0]])

    def figure(self, sums: Tensor, samples: int) -> float:
        return (sums[0] / sums[1]).item()


class OwnLossScore:
    def __init__(self, loss: OwnLoss, graph: Graph) -> None:
        self._loss, self._graph = loss, graph

    def sums(self, outputs: Outputs, targets: Any, rows: int) -> Tensor:
        weight = self._loss.weight(targets, rows)
        given = self._graph.arranged(outputs)
        total = self._loss.summed(given, targets, rows).detach().double()
        return torch.stack([total, total.new_tensor(weight)])

    def figure(self, sums: Tensor, samples: int) -> float:
        total, weight = sums.tolist()
        return self._loss.of_all(total, weight)


class OwnMetric:
    def __init__(self, name: str, value: Metric, graph: Graph) -> None:
        self._name, self._sums, self._graph = name, value.sums.loaded, graph
        self._result = None if value.result is None else value.result.loaded

    def sums(self, outputs: Outputs, targets: Any, rows: int) -> Tensor:
        found = self._sums(self._graph.arranged(outputs), targets)
        if not isinstance(found, Tensor):
            raise OwnObjectError(
                f"metric {self._name!r} gives {type(found).__name__}, and a tensor is wanted: a "
                "number for each row, or sums over rows"
            )
        if self._result is not None:
            return found
        if found.shape != (rows,):
            raise OwnObjectError(
                f"metric {self._name!r} gives shape {tuple(found.shape)} for {rows} rows; without "
                f"result= it is a number for each row, ({rows},)"
            )
        return found.sum()

    def figure(self, sums: Tensor, samples: int) -> float:
        return float(sums.item() / samples if self._result is None else self._result(sums))


class StatesOfMetric:
    """A metric with `update`, `compute` and `reset`, whose states add up: torchmetrics'.

    Raises:
        OwnObjectError: a state does not add up over rows.
    """

    def __init__(self, name: str, metric: Any, graph: Graph) -> None:
        self._metric, self._graph = metric, graph
        for state, reduction in metric._reductions.items():
            if getattr(reduction, "__name__", "") != "dim_zero_sum":
                raise OwnObjectError(
                    f"metric {name!r}: its state {state!r} does not add up over rows, so that it "
                    "cannot be made of the ranks' own; give Metric(sums, result=...)"
                )

    def sums(self, outputs: Outputs, targets: Any, rows: int) -> Tensor:
        self._metric.reset()
        self._metric.update(self._graph.arranged(outputs), targets)
        states = [getattr(self._metric, name) for name in self._metric._reductions]
        return torch.cat([torch.as_tensor(state).double().reshape(-1) for state in states])

    def figure(self, sums: Tensor, samples: int) -> float:
        self._metric.reset()
        start = 0
        for name in self._metric._reductions:
            state = torch.as_tensor(getattr(self._metric, name))
            part = sums[start : start + state.numel()].view(state.shape)
            setattr(self._metric, name, part.to(state.dtype))
            start += state.numel()
        self._metric._update_count = 1  # or it warns that there was no update
        return float(self._metric.compute())


class ScoringOfClasses:
    """Cross-entropy and accuracy, and perplexity of tokens, made of scores as they lie.

    Scores whose classes are cut stay so: their maxima and sums travel.
    """

    numel = 4

    def __init__(self, graph: Graph, options: CrossEntropy) -> None:
        self._options = options
        self._of_tokens = graph.scores_tokens and options.is_plain

    def of_model(self, model: CutModel, outputs: Outputs, targets: Any, rows: int) -> Tensor:
        """Over the rows that this rank counts [4], float64.

        Cross-entropy, hits, what the labels count, and how many are not ignored.
        """
        name = model.plan.graph.outputs[0]
        scores = Scores.of(model, name, outputs[0], targets, self._options)
        found = torch.stack([scores.cross_entropy().double(), scores.hits().double()])
        return torch.cat([found, scores.counted()]).detach().cpu() * scores.is_counted

    def figures(self, sums: Tensor, samples: int) -> dict[str, float]:
        loss, accuracy = (sums[:2] / sums[2:]).tolist()
        found = {"loss": loss, "accuracy": accuracy}
        return found | ({"perplexity": perplexity(loss)} if self._of_tokens else {})


def perplexity(loss: float) -> float:
    """The exponential of a mean cross-entropy; infinite where it is too large for one."""
    return math.exp(loss) if loss < _LARGEST else math.inf


class Scoring:
    """Figures of an evaluation that has a loss or metrics of its own, made of whole outputs."""

    def __init__(self, scores: Mapping[str, Score], shapes: Sequence[tuple[int, ...]]) -> None:
        self._scores, self._shapes = scores, shapes
        self._numels = [torch.Size(shape).numel() for shape in shapes]

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        loss: OwnLoss | None,
        tried: Trial | None,
        notes: list[str] | None = None,
    ) -> "Scoring":
        """What an experiment reports that has a loss or metrics of its own.

        Args:
            tried: what own metrics are tried on; None: nothing is evaluated.
            notes: takes what people should know of metrics whose result there is no number.

        Raises:
            OwnObjectError: a metric cannot be loaded, or fails on what it is tried on, or has sums
                that are no numbers.
        """
        notes = [] if notes is None else notes
        graph = experiment.plan.evaluation.graph
        given = experiment.loss if isinstance(experiment.loss, CrossEntropy) else PLAIN
        own_loss = MeanCrossEntropy(graph, given) if loss is None else OwnLossScore(loss, graph)
        scores = dict[str, Score](loss=own_loss)
        shapes: list[tuple[int, ...]] = [(2,)]
        for name, value in (experiment.metrics or {}).items():
            scores[name] = own_score(name, value, graph)
            shapes.append(() if tried is None else _tried(name, scores[name], tried, notes))
        return cls(scores, shapes)

    @property
    def numel(self) -> int:
        return sum(self._numels)

    def of_model(self, model: CutModel, outputs: Outputs, targets: Any, rows: int) -> Tensor:
        """All sums over this rank's rows [numel], float64; outputs are brought there, whole."""
        named = zip(model.plan.graph.outputs, outputs, strict=True)
        mine = tuple(own_rows(model, name, output) for name, output in named)
        if not rows:
            return torch.zeros(self.numel, dtype=torch.float64)
        return self.sums(mine, targets, rows)

    def sums(self, outputs: Outputs, targets: Any, rows: int) -> Tensor:
        """All sums over these rows [numel], float64."""
        found = [score.sums(outputs, targets, rows) for score in self._scores.values()]
        return torch.cat([each.detach().double().cpu().reshape(-1) for each in found])

    def figures(self, sums: Tensor, samples: int) -> dict[str, float]:
        """All figures, of the sums over all samples."""
        parts = zip(self._scores.items(), self._shapes, sums.split(self._numels), strict=True)
        return {
            name: score.figure(part.view(shape), samples) for (name, score), shape, part in parts
        }


def own_score(name: str, value: Metric, graph: Graph) -> Score:
    """The score of a user's own metric, of the model in evaluation mode.

    Raises:
        OwnObjectError: it cannot be loaded, or does not add up over rows.
    """
    if name == "loss":
        raise OwnObjectError("metrics: 'loss' is the name of the loss; give another one")
    loaded = value.sums.loaded
    if hasattr(loaded, "_reductions") and hasattr(loaded, "compute"):
        return StatesOfMetric(name, loaded, graph)
    return OwnMetric(name, value, graph)


def _tried(name: str, score: Score, tried: Trial, notes: list[str]) -> tuple[int, ...]:
    """The shape of a metric's sums, which do not depend on how many rows there are."""
    try:
        with torch.no_grad():
            whole = score.sums(tried.outputs, tried.targets, tried.rows)
            parts = [score.sums(p.outputs, p.targets, p.rows) for p in tried.cut(tried.rows // 2)]
            figure = score.figure(whole.double().cpu(), tried.rows)
    except OwnObjectError:
        raise
    except Exception as error:  # whatever its own code raises
        raise OwnObjectError(
            f"metric {name!r} fails for {tried}: {type(error).__name__}: {error}"
        ) from error
    if any(part.shape != whole.shape for part in parts):
        raise OwnObjectError(
            f"metric {name!r}: its sums have shape {tuple(whole.shape)} for {tried.rows} rows, and "
            f"another for half of them; they must add up over rows"
        )
    if not torch.allclose(
        torch.stack(parts).double().sum(0), whole.double(), 1e-4, 1e-6, equal_nan=True
    ):
        raise OwnObjectError(
            f"metric {name!r}: the sums over {tried.rows} rows are not those of their halves; they "
            "must add up, since ranks have rows of their own. A mean over rows is no sum"
        )
    if math.isfinite(figure):
        return tuple(whole.shape)
    found = f"metric {name!r} is {figure} for {tried}"
    if not whole.isfinite().all():
        raise OwnObjectError(
            f"{found}; outputs were between 0 and 1. One row that gives no number leaves none for "
            "the whole split: give such rows 0, and count the others, Metric(sums, result=...)"
        )
    # Numbers they are: a class that these samples lack, others may have.
    notes.append(f"{found}, which were tried before the first step")
    return tuple(whole.shape)


# Where random numbers follow from the step, evaluations are none.
NO_STEP = -1


def evaluate(
    model: CutModel,
    data: Dataset,
    batch_size: int,
    world: Group,
    device: torch.device,
    dtype: torch.dtype,
    scoring: Scoring | ScoringOfClasses,
    excused: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, float]:
    """The figures over every sample of `data`, the same on all ranks.

    The model is cut as in training and keeps its placements. What it draws at random even then,
    it draws alike in every evaluation.
    """
    average_statistics(model)
    model.eval()
    whole = evaluating(model).eval()
    totals = torch.zeros(scoring.numel, dtype=torch.float64)
    # In inference mode torch decomposes no operation, and what it has instead of an LSTM ends the
    # process of a rank without rows.
    with torch.no_grad():
        for first in range(0, len(data), batch_size):
            count = min(batch_size, len(data) - first)
            rows = model.plan.rows_of(count)
            whole.context.set(rows, first_row=first, step=NO_STEP)
            start, own = first + sum(rows[: world.rank]), rows[world.rank]
            with excused():
                batch = data.batch(torch.arange(start, start + own))
            inputs, targets = moved(batch, device, dtype)
            totals += scoring.of_model(whole, whole(*inputs), targets, own)
    model.train()
    totals = all_reduce(totals, world, layer="evaluation")
    return scoring.figures(totals, len(data))
