"""Requests to a run that goes on, which it carries out between two steps, and what they cost."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.optimizers import AnyOptimizer, Rprop
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan
from workbench.plan.plans.reshard import Reshard
from workbench.program.buckets import copies
from workbench.store.errors import ClusterError
from workbench.train.run.requests import CarriedOut, LearningRate, RunRequest, RunRequests

TICK_S = 0.05


class RequestHandle:
    """A request for another learning rate, or for a checkpoint; made with this.

    Args:
        requests: the run's requests, which its ranks read.
        request: what is requested.
        is_over: says whether the run has ended.

    Attributes:
        request: what is requested.
    """

    def __init__(
        self, requests: RunRequests, request: RunRequest, is_over: Callable[[], bool]
    ) -> None:
        self.request, self._requests, self._is_over = request, requests, is_over
        self._number = requests.submit(request)

    @property
    def carried_out(self) -> CarriedOut | None:
        """After how many steps it was, and how long it took; None: it was not yet."""
        return self._requests.carried_out(self._number)

    @property
    def is_superseded(self) -> bool:
        """Whether a later request was carried out, and this one never will be."""
        return self.carried_out is None and self._requests.last_carried_out() > self._number

    def wait(self, timeout: float = 60.0) -> CarriedOut:
        """Returns once the run has carried it out.

        Raises:
            ClusterError: the run ended before, or a later request came instead.
            TimeoutError: it did not in time; it may still.
        """
        deadline = time.monotonic() + timeout
        while (found := self.carried_out) is None:
            if self.is_superseded:
                raise ClusterError("another plan was requested later, and carried out instead")
            if self._is_over() and self.carried_out is None:
                raise ClusterError(
                    f"the run ended before {self.request!r} was carried out; it will be once the "
                    "run is resumed"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.request!r} is not carried out yet")
            time.sleep(TICK_S)
        return found

    def __repr__(self) -> str:
        done = self.carried_out
        step = "not yet" if done is None else f"step {done.step}"
        return f"<Request: {self.request!r}, {step}>"


def learning_rate(value: float, optimizer: AnyOptimizer) -> LearningRate:
    """The request for a learning rate of an optimizer.

    Raises:
        ValueError: the rate is no positive number, or would change nothing.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ValueError(f"a learning rate is a positive number, got {value!r}")
    if isinstance(optimizer, Rprop):
        raise ValueError("Rprop finds its step sizes itself: another rate would do nothing")
    return LearningRate(float(value))


@dataclass(frozen=True)
class Cost:
    """What a re-cut takes, as predicted.

    Attributes:
        received_bytes: what each rank receives [bytes]: weights, optimizer state, and what
            strategies and error feedback keep, as when a pipeline is full.
        seconds: what the rank takes that receives most; None: without a machine nothing is
            claimed.
    """

    received_bytes: tuple[int, ...]
    seconds: float | None


def cost_of(experiment: Experiment, plan: Plan, machine: Machine | None = None) -> Cost:
    """What it takes for a run of an experiment to go on under another plan.

    Raises:
        PlanError: the plan is for another model or world size.
    """
    reshard = Reshard(experiment.plan, plan)
    width = 8 if experiment.precision == "fp64" else 4
    timing, (_, codec) = experiment.sync.timing, experiment.sync.summing
    sums = 1 + timing.late
    kept = timing.late * (2 if timing.keeps_weights else 1) + timing.adds_up
    kept += len(timing.remembers) + (experiment.ema is not None)
    states = {name: copies(one) + kept for name, one in experiment.optimizers.items()}
    residuals = sums if codec is not None and codec.error_feedback else 0
    received = tuple(
        width * reshard.received(rank, states, residuals) for rank in range(plan.world_size)
    )
    if machine is None:
        return Cost(received, None)
    link = machine.link(range(plan.world_size))
    most = float(max(received))
    return Cost(received, link.seconds("all_to_all", plan.world_size, most, 1, 0.0))


class Replan(RequestHandle):
    """A request that a run goes on under another plan; made with this.

    Args:
        requests: the run's requests, which its ranks read.
        plan: the plan to go on under.
        cost: what the change takes, as predicted.
        is_over: says whether the run has ended.

    Attributes:
        plan: the plan to go on under.
        cost: what the change takes, as predicted.
    """

    def __init__(
        self, requests: RunRequests, plan: Plan, cost: Cost, is_over: Callable[[], bool]
    ) -> None:
        self.plan, self.cost = plan, cost
        super().__init__(requests, plan, is_over)

    def __repr__(self) -> str:
        done = self.carried_out
        predicted = f"{max(self.cost.received_bytes):,} bytes at most for a rank"
        if done is None:
            return f"<Replan: not carried out yet; {predicted}>"
        return (
            f"<Replan: since step {done.step}, in {done.seconds:.3g} s; "
            f"{max(done.received_bytes):,} bytes at most for a rank>"
        )


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
