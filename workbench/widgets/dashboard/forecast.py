"""What was predicted of a run, beside which a dashboard shows what is measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.machine.machine import Machine
from workbench.predict.memory.timeline import Category
from workbench.predict.prediction import Prediction, predict
from workbench.widgets.base.background import LatestWorker
from workbench.widgets.dashboard.series import CATEGORIES

# As `ranks.RankFigures` sums them up: what is only there within a step counts as activations.
_PART_OF: dict[Category, str] = {
    "weights": "weights",
    "gradients": "gradients",
    "buckets": "gradients",
    "in_flight": "gradients",
    "codec": "gradients",
    "optimizer": "optimizer",
    "staging": "buffers",
    "data": "activations",
    "activations": "activations",
    "activation_gradients": "activations",
    "workspace": "activations",
}
NO_MACHINE = (
    "Time is predicted for a machine: dashboard.machine = cluster.calibrate(run.experiment.plan), "
    "or wb.Machine.preset('h100-nvlink')."
)


@dataclass(frozen=True, eq=False)
class RunForecast:
    """A prediction, as a dashboard shows it.

    Attributes:
        prediction: the prediction, or None where there is none.
        ranks: bytes of each of `series.CATEGORIES`, and bytes received in a step, [ranks, 6].
        samples_per_s: predicted throughput; None without a machine.
        step_s: predicted seconds of a step; None without a machine.
        reason: why there is no prediction, or what would predict more; "" where nothing is missing.
    """

    prediction: Prediction | None
    ranks: NDArray[np.float64]
    samples_per_s: float | None = None
    step_s: float | None = None
    reason: str = ""

    @classmethod
    def none(cls, reason: str = "") -> "RunForecast":
        """Nothing is predicted."""
        return cls(None, np.empty((0, len(CATEGORIES) + 1)), reason=reason)

    def as_dict(self) -> dict[str, Any]:
        """What a view needs of it besides the ranks."""
        return {
            "samples_per_s": self.samples_per_s,
            "step_s": self.step_s,
            "reason": self.reason,
        }


def forecast_of(experiment: Experiment, machine: Machine | None) -> RunForecast:
    """What is predicted of an experiment; of its time only with a machine."""
    found = predict(experiment.plan, machine, experiment)
    rows = []
    for rank in range(experiment.plan.world_size):
        parts = dict.fromkeys(CATEGORIES, 0.0)
        for category, size in found.memory[rank].categories.items():
            parts[_PART_OF[category]] += size
        rows.append((*parts.values(), found.traffic.received_bytes(rank)))
    if machine is None:
        return RunForecast(found, np.array(rows), reason=NO_MACHINE)
    return RunForecast(found, np.array(rows), found.samples_per_s, found.step_time)


class Forecaster:
    """A thread that predicts what was asked for last.

    Args:
        found: Called on that thread with each forecast; it must not raise.
    """

    def __init__(self, found: Callable[[RunForecast], None]) -> None:
        self._found = found
        self._asked: tuple[object, object] | None = None
        self._latest: LatestWorker[tuple[Experiment, Machine | None]] = LatestWorker(
            self._work, "dashboard's predictions", lambda: None
        )
        self.settle, self.close = self._latest.settle, self._latest.close

    def ask(self, experiment: Experiment, machine: Machine | None) -> None:
        """Has an experiment predicted, unless it was asked for last."""
        # A learning rate, or another number of steps, changes nothing that is predicted.
        question = (
            (experiment.plan, experiment.sync, experiment.batch_size),
            machine,
        )
        if self._asked is None or not _same(self._asked, question):
            self._asked = question
            self._latest.ask((experiment, machine))

    def _work(self, question: tuple[Experiment, Machine | None]) -> None:
        try:
            found = forecast_of(*question)
        except Exception as error:  # it belongs into the widget, whatever it is
            found = RunForecast.none(f"No prediction: {error or type(error).__name__}")
        if not self._latest.superseded():
            self._found(found)


def _same(known: Sequence[object], asked: Sequence[object]) -> bool:
    return known[1] is asked[1] and known[0] == asked[0]
