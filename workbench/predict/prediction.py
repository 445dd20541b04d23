"""What is known of a plan before it runs."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from workbench.plan.errors import ExperimentError
from workbench.plan.experiment import Experiment
from workbench.plan.plan import Plan
from workbench.predict.counting import traffic_of
from workbench.predict.memory import Memory, memory_of
from workbench.predict.program import Program, program_of
from workbench.predict.show import as_html, as_text
from workbench.predict.traffic import Traffic


@dataclass(frozen=True)
class Prediction:
    """Memory and traffic of one step of an experiment.

    Attributes:
        experiment: whose.
    """

    experiment: Experiment

    @cached_property
    def program(self) -> Program:
        """What its ranks execute."""
        return program_of(self.experiment)

    @cached_property
    def memory(self) -> Memory:
        """On every rank, in bytes of each category and layer."""
        return memory_of(self.program)

    @cached_property
    def traffic(self) -> Traffic:
        """What every collective brings to every rank."""
        return traffic_of(self.program)

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # not what is cached

    def __repr__(self) -> str:
        plan = self.experiment.plan
        peak, bytes_ = self.memory.peak_bytes, self.traffic.most_received_bytes
        return (
            f"<Prediction {plan.graph.source.name} on {plan.world_size} ranks: at most "
            f"{peak / 2**20:,.1f} MiB and {bytes_ / 1e6:,.2f} MB received per rank and step>"
        )

    def __str__(self) -> str:
        return as_text(repr(self), self.memory, self.traffic)

    def _repr_html_(self) -> str:
        return as_html(repr(self), self.memory, self.traffic)


def predict(plan: Plan, machine: None = None, experiment: Experiment | None = None) -> Prediction:
    """What a plan will need, from its shapes alone: nothing runs, and torch is not loaded.

    Args:
        plan: the plan.
        machine: None; memory and traffic are the same on all machines with these kernels.
        experiment: how it is run; its own plan is put aside for `plan`.

    Raises:
        ExperimentError: no experiment, or one that cannot run this plan.
    """
    if not isinstance(experiment, Experiment):
        raise ExperimentError(
            f"predict needs an Experiment (batch size, optimizer, precision), got {experiment!r}"
        )
    return Prediction(experiment.replace(plan=plan))
