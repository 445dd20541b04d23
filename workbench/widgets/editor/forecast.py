"""Predictions beside the user interface, and what the editor shows of one.

Of many edits the latest counts. A prediction becomes figures layer by layer for one rank, and in
total for all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan
from workbench.predict.memory.timeline import Category
from workbench.predict.prediction import Prediction, predict
from workbench.predict.time.events import (
    AwaitCollective,
    BlockingCollective,
    Computation,
    StartedCollective,
)
from workbench.widgets.base.widget import LatestWorker
from workbench.widgets.editor.rows import Columns

MOST_RANKS = 64  # that have their own bar
# Parts of a rank's memory as people think of them.
PARTS = ("weights", "gradients", "optimizer", "activations", "other")
_PART_OF: dict[Category, str] = {
    "weights": "weights",
    "gradients": "gradients",
    "buckets": "gradients",
    "in_flight": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "activation_gradients": "activations",
    "data": "activations",
}
_SUMS = ("gradients", "parameters")  # what collectives of replicas are for


@dataclass(frozen=True)
class Totals:
    """What a step needs as a whole.

    Attributes:
        peak_bytes: Peak memory of the rank that needs most.
    """

    peak_bytes: float
    received_bytes: float
    step_s: float | None = None
    samples_per_s: float | None = None


@dataclass(frozen=True)
class Figures:
    """One prediction, as the editor shows it.

    Attributes:
        layers: columns memory, work_s, exchange_s, moved (bytes of activations that come), forward
            and backward (of these, by phase), summed (bytes of gradients and weights).
        ranks: for each rank that is shown its peak, limit and parts of memory, and its seconds.
        step: seconds of each part of the step of `rank`; empty without a machine.
    """

    rank: int
    layers: Columns
    totals: Totals
    ranks: list[dict[str, Any]]
    step: dict[str, float]
    notes: list[str]


def figures_of(prediction: Prediction, rank: int | None, limit: int | None = None) -> Figures:
    """The figures of a prediction.

    Args:
        prediction: the prediction of a plan.
        rank: the rank whose layers are shown; None: the one that needs most memory.
        limit: bytes of each rank where there is no machine.
    """
    plan: Plan = prediction.experiment.plan
    memory = prediction.memory
    if rank is None or rank >= plan.world_size:
        rank = max(range(plan.world_size), key=lambda r: memory[r].peak_bytes)
    layers = {**_memory(prediction, rank), **_traffic(prediction, rank), **_time(prediction, rank)}
    totals = Totals(memory.peak_bytes, float(prediction.traffic.most_received_bytes))
    step: dict[str, float] = {}
    if prediction.machine is not None:
        totals = Totals(
            totals.peak_bytes,
            totals.received_bytes,
            prediction.step_time,
            prediction.samples_per_s,
        )
        step = {part: seconds for part, seconds in prediction.breakdown[rank].items() if seconds}
    columns = {name: _short(column) for name, column in layers.items()}
    return Figures(rank, columns, totals, _ranks(prediction, rank, limit), step, _notes(prediction))


def _memory(prediction: Prediction, rank: int) -> dict[str, list[float]]:
    held: dict[str, int] = {}
    for (_, owner), size in prediction.memory[rank].held.items():
        held[owner] = held.get(owner, 0) + size
    return {"memory": [held.get(layer.name, 0) for layer in _layers(prediction)]}


def _traffic(prediction: Prediction, rank: int) -> dict[str, list[float]]:
    """Bytes that a layer brings: of conversions and norms, and its part of what replicas sum."""
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    sums: dict[int, float] = {}
    for one in prediction.traffic.collectives:
        size = one.bytes[rank] / one.every
        if one.layer in _SUMS and one.purpose == "replica":
            apart = one.groups[0][1] - one.groups[0][0] if len(one.groups[0]) > 1 else 1
            sums[apart] = sums.get(apart, 0) + size
        else:
            side = backward if one.phase == "backward" else forward
            side[one.layer] = side.get(one.layer, 0) + size
    layers = _layers(prediction)
    there = [forward.get(layer.name, 0.0) for layer in layers]
    back = [backward.get(layer.name, 0.0) for layer in layers]
    moved = [a + b for a, b in zip(there, back, strict=True)]
    return {
        "moved": moved,
        "forward": there,
        "backward": back,
        "summed": _summed(prediction, rank, sums),
    }


def _summed(prediction: Prediction, rank: int, sums: dict[int, float]) -> list[float]:
    """Gradients travel in buckets of many layers: of one, each layer has its share of elements."""
    plan: Plan = prediction.experiment.plan
    weights = plan.flow.weights
    known: dict[int, tuple[int, int]] = {}  # equal weights that lie alike share their placement

    def piece(name: str) -> tuple[int, int]:
        one = weights[name]
        if id(one) not in known:
            known[id(one)] = (one.group_size, one.piece_numel(rank))
        return known[id(one)]

    layers = plan.graph.layers
    pieces = [[piece(w.name) for w in layer.weights if w.trainable] for layer in layers]
    elements: dict[int, int] = {}
    for own in pieces:
        for group, count in own:
            elements[group] = elements.get(group, 0) + count
    return [
        sum(sums.get(group, 0.0) * count / max(elements[group], 1) for group, count in own)
        for own in pieces
    ]


def _time(prediction: Prediction, rank: int) -> dict[str, list[float]]:
    """Seconds of a layer's own passes, and of the collectives that are for it."""
    work: dict[str, float] = {}
    exchange: dict[str, float] = {}
    if prediction.machine is not None:
        schedule = prediction.timeline
        column = int(schedule.alike.column[rank])
        for happened in schedule.step.happened:
            match happened.event:
                case Computation(tasks):
                    for task in tasks:
                        work[task.label] = work.get(task.label, 0.0) + task.seconds[column]
                case BlockingCollective(call) | StartedCollective(call) if (
                    call.takes is None or call.takes[column]
                ):
                    seconds = happened.end[column] - happened.begin[column]
                    exchange[call.label] = exchange.get(call.label, 0.0) + seconds
                case BlockingCollective() | StartedCollective() | AwaitCollective():
                    pass
    return {
        "work_s": [float(work.get(layer.name, 0.0)) for layer in _layers(prediction)],
        "exchange_s": [float(exchange.get(layer.name, 0.0)) for layer in _layers(prediction)],
    }


def _ranks(prediction: Prediction, shown: int, limit: int | None) -> list[dict[str, Any]]:
    memory, machine = prediction.memory, prediction.machine
    world = prediction.experiment.plan.world_size
    chosen = sorted({*range(min(world, MOST_RANKS)), shown})
    known: dict[int, dict[str, int]] = {}  # ranks that are alike hold the same mapping
    found = []
    for rank in chosen:
        held = memory[rank].held
        parts = known.get(id(held)) or known.setdefault(id(held), _parts(held))
        peak = memory[rank].peak_bytes
        found.append(
            {
                "rank": rank,
                "peak": peak,
                "limit": limit if machine is None else machine.device(rank).memory_bytes,
                "device": "" if machine is None else machine.device(rank).name,
                "parts": parts,
                "when": str(memory[rank].moment),
            }
        )
    return found


def _parts(held: Mapping[tuple[Category, str], int]) -> dict[str, int]:
    """Bytes of each of `PARTS`."""
    found = dict.fromkeys(PARTS, 0)
    for (category, _), size in held.items():
        found[_PART_OF.get(category, "other")] += size
    return found


def _notes(prediction: Prediction) -> list[str]:
    notes = []
    if prediction.memory.guessed:
        notes.append(
            f"Memory may be too little: what {_named(prediction.memory.guessed)} keep for their "
            "backward pass is not known."
        )
    if prediction.machine is not None and prediction.estimated:
        notes.append(
            f"Times of {len(prediction.estimated)} layers are estimated: {prediction.machine.name} "
            "has not measured such shapes."
        )
    return notes


def _layers(prediction: Prediction) -> Any:
    return prediction.experiment.plan.graph.layers


def _named(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _short(column: list[float]) -> list[float]:
    """Four digits are shown at most; more of them would only make patches larger."""
    # Equal blocks of a deep model have equal figures.
    known = {value: float(f"{value:.4g}") for value in set(column)}
    return [known[value] for value in column]


@dataclass(frozen=True)
class Question:
    """What to predict.

    Attributes:
        rank: the rank whose layers are shown; None: the one that needs most memory.
        limit: bytes of each rank where there is no machine.
    """

    plan: Plan
    machine: Machine | None
    experiment: Experiment
    rank: int | None
    limit: int | None


class PlanForecaster:
    """A thread that predicts what was asked for last.

    Args:
        rest: Called on the thread when no edit has followed for a while.
    """

    def __init__(
        self,
        found: Callable[[Question, Prediction, Figures], None],
        failed: Callable[[Question, str], None],
        rest: Callable[[], None],
    ) -> None:
        self._found, self._failed = found, failed
        self._known: Prediction | None = None
        self._latest: LatestWorker[Question] = LatestWorker(
            self._work, "plan editor's predictions", rest
        )
        self.ask, self.settle, self.close = (
            self._latest.ask,
            self._latest.settle,
            self._latest.close,
        )

    def _work(self, question: Question) -> None:
        try:
            prediction = self._predict(question)
            figures = figures_of(prediction, question.rank, question.limit)
        except Exception as error:  # it belongs into the widget, whatever it is
            self._failed(question, str(error) or type(error).__name__)
            return
        if not self._latest.superseded():
            self._found(question, prediction, figures)

    def _predict(self, question: Question) -> Prediction:
        """Where only another rank is looked at, everything is known already."""
        known = self._known
        if known is None or known.machine is not question.machine or not _same(known, question):
            known = predict(question.plan, question.machine, question.experiment)
        self._known = known
        return known


def _same(known: Prediction, question: Question) -> bool:
    if known.experiment.plan is not question.plan:
        return False
    return bool(known.experiment == question.experiment.replace(plan=question.plan))
