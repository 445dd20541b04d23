"""A running experiment that is to go on under another plan, as a notebook sees it."""

from collections.abc import Callable
from dataclasses import dataclass

from workbench.cluster.wished import Wished
from workbench.plan.experiment import SGD, Experiment, Pipelined, Synchronous
from workbench.plan.machine import Machine
from workbench.plan.plan import Plan
from workbench.plan.recut import Recut
from workbench.train.wishes import Wishes


@dataclass(frozen=True)
class Cost:
    """What a re-cut takes, as predicted.

    Attributes:
        received_bytes: of weights, optimizer state, and what pipelined steps and error feedback
            keep (as when a pipeline is full), on each rank.
        seconds: of the rank that receives most; None: without a machine nothing is claimed.
    """

    received_bytes: tuple[int, ...]
    seconds: float | None


def cost_of(experiment: Experiment, plan: Plan, machine: Machine | None = None) -> Cost:
    """What it takes for a run of an experiment to go on under another plan.

    Raises:
        PlanError: the plan is of another model or world size.
    """
    recut = Recut(experiment.plan, plan)
    value, width = experiment.optimizer, 8 if experiment.precision == "fp64" else 4
    states = (1 if value.momentum > 0 else 0) if isinstance(value, SGD) else 2
    sync, sums = experiment.sync, 1
    if isinstance(sync, Pipelined):
        sums = sync.width
        states += (sync.width - 1) * (1 if sync.compensation is None else 2)
    codec = sync.codec if isinstance(sync, Pipelined | Synchronous) else None
    residuals = sums if codec is not None and codec.error_feedback else 0
    received = tuple(
        width * recut.received(rank, states, residuals) for rank in range(plan.world_size)
    )
    if machine is None:
        return Cost(received, None)
    link = machine.link(range(plan.world_size))
    most = float(max(received))
    return Cost(received, link.seconds("all_to_all", plan.world_size, most, 1, 0.0))


class Replan(Wished):
    """The wish that a run goes on under a plan.

    Attributes:
        plan: the plan.
        cost: as predicted.
    """

    def __init__(self, wishes: Wishes, plan: Plan, cost: Cost, is_over: Callable[[], bool]) -> None:
        self.plan, self.cost = plan, cost
        super().__init__(wishes, plan, is_over)

    def __repr__(self) -> str:
        done = self.carried_out
        predicted = f"{max(self.cost.received_bytes):,} bytes at most for a rank"
        if done is None:
            return f"<Replan: not carried out yet; {predicted}>"
        return (
            f"<Replan: since step {done.step}, in {done.seconds:.3g} s; "
            f"{max(done.received_bytes):,} bytes at most for a rank>"
        )
