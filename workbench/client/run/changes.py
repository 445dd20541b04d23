"""What was requested of a run that goes on and was carried out, by whomever: told once."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workbench.client.run.requests import Replan, cost_of
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan
from workbench.train.run.requests import RunRequests


@dataclass(frozen=True)
class News:
    """What changed since the last look.

    Attributes:
        notes: what was carried out, for people.
        is_replanned: whether it goes on under another plan of ours.
    """

    experiment: Experiment
    notes: tuple[str, ...] = ()
    is_replanned: bool = False


class Changes:
    """The changes of one run. Its callers take turns."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._replans: list[Replan] = []  # our own that were not carried out yet, in their order
        self._requests = RunRequests(directory)
        self._told = set[int]()

    def replan(
        self,
        experiment: Experiment,
        plan: Plan,
        machine: Machine | None,
        is_over: Callable[[], bool],
    ) -> Replan:
        """Requests another plan.

        Args:
            is_over: says whether the run has ended.

        Raises:
            PlanError: the plan is of another model or number of ranks.
            ExperimentError: the experiment cannot run under it.
        """
        last = self._replans[-1].plan if self._replans else experiment.plan
        experiment.replace(plan=plan)  # raises where it cannot be
        cost = cost_of(experiment.replace(plan=last), plan, machine)
        replan = Replan(RunRequests(self._directory), plan, cost, is_over)
        self._replans.append(replan)
        return replan

    def news(self, experiment: Experiment) -> News:
        """What was carried out meanwhile; what cannot be read now is news the next time."""
        requests, self._requests = self._requests, RunRequests(self._directory)
        try:
            replanned, changed = self._replanned(), requests.changed()
            rates = list(requests.rates()) if changed else []
            saved = list(requests.saved()) if changed else []
        except OSError:  # a disk that is gone for a moment
            return News(experiment)
        self._requests = requests
        plain, notes = experiment, [note for _, note in replanned]
        if replanned:  # its plan is the last one that it goes on under
            plain = plain.replace(plan=replanned[-1][0].plan)
            last = self._replans.index(replanned[-1][0])
            del self._replans[: last + 1]  # those before it are over, too
        for number, value, done in rates:
            plain = plain.at_rate(value)
            notes += self._once(number, f"learning rate {value:g} since step {done.step}")
        for number, done in saved:
            text = f"checkpoint after step {done.step}, as requested, in {done.seconds:.3g} s"
            notes += self._once(number, text)
        return News(plain, tuple(notes), bool(replanned))

    def _replanned(self) -> list[tuple[Replan, str]]:
        return [
            (
                replan,
                f"under another plan since step {done.step}: {done.seconds:.3g} s, "
                f"{sum(done.received_bytes):,} bytes moved",
            )
            for replan in self._replans
            if (done := replan.carried_out)
        ]

    def _once(self, number: int, text: str) -> list[str]:
        is_news = number not in self._told
        self._told.add(number)
        return [text] if is_news else []
