"""Predictions beside the user interface: of many edits, the latest counts."""

from collections.abc import Callable
from dataclasses import dataclass

from workbench.plan.experiment import Experiment
from workbench.plan.machine import Machine
from workbench.plan.plan import Plan
from workbench.predict.prediction import Prediction, predict
from workbench.widgets.editor.figures import Figures, figures_of
from workbench.widgets.latest import Latest


@dataclass(frozen=True)
class Question:
    """What to predict.

    Attributes:
        plan: of which.
        machine: None: memory and traffic alone.
        experiment: its plan is put aside.
        rank: whose layers are shown; None: of the fullest one.
        limit: bytes of each rank where there is no machine.
    """

    plan: Plan
    machine: Machine | None
    experiment: Experiment
    rank: int | None
    limit: int | None


class Forecast:
    """A thread that predicts what was asked for last.

    Args:
        found: is called on the thread with what was asked, the prediction and its figures.
        failed: likewise, with the reason.
        rest: is called on the thread when no edit has followed for a while.
    """

    def __init__(
        self,
        found: Callable[[Question, Prediction, Figures], None],
        failed: Callable[[Question, str], None],
        rest: Callable[[], None],
    ) -> None:
        self._found, self._failed = found, failed
        self._known: Prediction | None = None
        self._latest: Latest[Question] = Latest(self._work, "plan editor's predictions", rest)
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
