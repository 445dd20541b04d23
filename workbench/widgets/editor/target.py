"""What an editor's plan is for: a machine that it is predicted on, engines, a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from workbench.plan.experiment import SGD, Experiment, Synthetic
from workbench.plan.graph import Graph
from workbench.plan.machine import Machine
from workbench.plan.plan import Plan

RANKS = 4  # where nothing says how many there are
ROWS = 32  # of each rank, where nothing says how large a batch is


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
class Target:
    """What there is of it.

    Attributes:
        machine: to predict on.
        cluster: to verify on.
        run: to go on under the plan.
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


def usual(plan: Plan) -> Experiment:
    """An experiment for predictions where none is given: a plain step of momentum SGD."""
    return Experiment(
        plan=plan,
        data=Synthetic(),
        batch_size=ROWS * plan.world_size,
        optimizer=SGD(lr=0.01, momentum=0.9),
        steps=1,
    )
