"""What an editor's plan is for, a machine, engines or a run, and what can be asked of these.

Searching, verifying, measuring and applying take seconds or minutes: the editor has them done in
the background, and shows what they return.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.graph.graph import Graph
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan
from workbench.predict.search import MemoryLimitError, search
from workbench.predict.search.limit import bytes_of
from workbench.predict.search.result import summary

RANKS = 4  # where nothing says how many there are

ADVICE = {
    "suggest": "Raise the memory limit, or take more ranks; the plan is as it was.",
    "verify": "print(editor.cluster) shows whether its engines are there; the plan is as it was.",
    "measure": "print(editor.cluster) shows whether its engines are there and free.",
    "apply": "The run goes on as it was, if it has not ended.",
    "load": "The plan is as it was.",
    "save": "Nothing was written.",
}
"""What to do about each of these that failed."""

_NO_MACHINE = (
    "time needs a machine: wb.PlanEditor(plan, wb.Machine.preset('h100-nvlink')), or "
    "editor.machine = cluster.calibrate()"
)
_NO_CLUSTER = "needs engines: wb.PlanEditor(plan, wb.Cluster(4)), or editor.cluster = cluster"
_NO_RUN = "needs a run: wb.PlanEditor(plan, run), or editor.run = cluster.train(experiment)"


@runtime_checkable
class Engines(Protocol):
    """What the editor needs of a cluster; `workbench.client.Cluster` has it, and more."""

    @property
    def devices(self) -> Sequence[Any]:
        """Have `memory_bytes` each."""

    def verify(self, plan: Plan, **options: Any) -> Any:
        """Holds the split model against the unsplit one; has `exact` and `worst`."""

    def calibrate(self, *what: Graph | Plan, **options: Any) -> Machine:
        """Measures the machine."""

    def __len__(self) -> int: ...


@runtime_checkable
class Running(Protocol):
    """What the editor needs of a run; `workbench.client.Run` has it, and more."""

    @property
    def experiment(self) -> Experiment:
        """What runs."""

    def replan(self, plan: Plan, machine: Machine | None = None) -> Any:
        """Goes on under another plan; the answer has `cost` and `wait`."""


@dataclass(frozen=True)
class Suggestion:
    """What a search found.

    Attributes:
        plans: the plans that can be taken, the fastest first.
        told: what a view shows of them: `text`, `points` (one for each plan) and `limit`.
    """

    plans: tuple[Plan, ...]
    told: dict[str, Any]


@dataclass(frozen=True)
class Target:
    """What there is to predict on, to verify on, or to go on under the plan.

    Attributes:
        machine: the machine that time is predicted on, or None.
        cluster: the engines that verify a plan and measure the machine, or None.
        run: the run that a plan can be applied to, or None.
    """

    machine: Machine | None = None
    cluster: Engines | None = None
    run: Running | None = None

    @classmethod
    def of(cls, given: object) -> "Target":
        """From what a user has at hand.

        Raises:
            TypeError: none of these.
        """
        if given is None:
            return cls()
        if isinstance(given, Machine):
            return cls(machine=given)
        if isinstance(given, Running):
            return cls(run=given)
        if isinstance(given, Engines):
            return cls(cluster=given)
        raise TypeError(
            f"a plan is edited for a Machine, a Cluster, a Run or None, got {type(given).__name__}"
        )

    def ranks(self, experiment: Experiment | None) -> int:
        """How many ranks a first plan is for."""
        if experiment is not None:
            return int(experiment.plan.world_size)
        if self.cluster is not None:
            return len(self.cluster)
        if self.machine is not None and len(self.machine.devices) > 1:
            return len(self.machine.devices)
        return RANKS

    @property
    def memory_bytes(self) -> int | None:
        """Of the smallest device; None: nobody knows."""
        if self.machine is not None:
            return min(device.memory_bytes for device in self.machine.devices)
        if self.cluster is not None:
            return min(device.memory_bytes for device in self.cluster.devices)
        return None

    @property
    def possible(self) -> dict[str, str]:
        """For each thing that can be asked "" where it can be had, or what it needs."""
        return {
            "suggest": "" if self.machine is not None else _NO_MACHINE,
            "verify": "" if self.cluster is not None else _NO_CLUSTER,
            "measure": "" if self.cluster is not None else _NO_CLUSTER,
            "apply": "" if self.run is not None else _NO_RUN,
        }

    def suggest(self, plan: Plan, experiment: Experiment, limit: str) -> Suggestion:
        """Searches the fastest plan that fits, and those that need less memory.

        Args:
            plan: the plan whose model and world size are searched for.
            experiment: what a step is.
            limit: the memory of a rank, such as "2GiB"; "": that of its device.

        Raises:
            ValueError: there is no machine.
            PlanError: the limit is none.
        """
        if self.machine is None:
            raise ValueError(_NO_MACHINE)
        most = limit or None
        try:
            found = search(plan, self.machine, experiment, memory_limit=most)
        except MemoryLimitError as error:
            point = {"step_s": None, "peak": error.needed, "plan": summary(error.plan)}
            least = None if most is None else bytes_of(most)
            told: dict[str, Any] = {"text": str(error), "points": [point], "limit": least}
            return Suggestion((error.plan,), told)
        points = [
            {"step_s": one.step_time, "peak": one.peak_bytes, "plan": summary(one.plan)}
            for one in found.pareto
        ]
        proven = "proven to be the best"
        best = f"at most {found.gap:.1%} above the best" if found.gap else proven
        text = f"{found.judged} plans predicted in {found.seconds:.1f} s; the fastest is {best}."
        told = {"text": text, "points": points, "limit": found.memory_limit}
        return Suggestion(tuple(one.plan for one in found.pareto), told)

    def verify(self, plan: Plan, module: Any) -> dict[str, Any]:
        """Holds the split model against the unsplit one on the cluster.

        Raises:
            ValueError: there is no cluster.
        """
        if self.cluster is None:
            raise ValueError(f"verify {_NO_CLUSTER}")
        found = self.cluster.verify(plan, **_given(module))
        worst = found.worst
        verdict = "Exact" if found.exact else "NOT exact"
        return {
            "good": bool(found.exact),
            "text": f"{verdict}: {len(found.differences)} tensors of {found.precision}, the worst "
            f"{worst.what} of {worst.name} on rank {worst.rank} is off by {worst.error:.1e} "
            f"(tolerance {found.tolerance(worst.what):.0e}).",
        }

    def measure(self, graph: Graph, module: Any) -> Machine:
        """Calibrates the cluster for a model, so that time can be predicted.

        Raises:
            ValueError: there is no cluster.
        """
        if self.cluster is None:
            raise ValueError(f"measure {_NO_CLUSTER}")
        return self.cluster.calibrate(graph, **_given(module))

    def apply(self, plan: Plan) -> dict[str, Any]:
        """Has the run go on under the plan after its current step.

        Raises:
            ValueError: there is no run.
        """
        if self.run is None:
            raise ValueError(f"apply {_NO_RUN}")
        request = self.run.replan(plan, self.machine)
        moved = max(request.cost.received_bytes) / 1e6
        request.wait()
        text = f"The run goes on under this plan; {moved:,.1f} MB at most came to a rank."
        return {"good": True, "text": text}


def _given(module: Any) -> dict[str, Any]:
    return {} if module is None else {"module": module}
