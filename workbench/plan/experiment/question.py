"""What predictions and searches are asked about: a plan or a graph, a machine, an experiment.

`predict`, `search` and `balanced` take these three in this order, and whatever else by name. An
experiment may stand for its own plan. Where none is given, a usual step is meant.
"""

from typing import Any

from workbench.plan.experiment.experiment import SGD, Experiment, Optimizer, Synthetic
from workbench.plan.graph.graph import Graph
from workbench.plan.io.errors import ExperimentError, MachineError, PlanError
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan


def required_plan(asker: str, given: Any) -> Plan:
    """The plan that is given, or that of an experiment."""
    if isinstance(given, Experiment):
        own: Plan = given.plan
        return own
    if isinstance(given, Plan):
        return given
    if isinstance(given, Graph):
        raise PlanError(
            f"{asker} needs a Plan, got the Graph of {given.source.name}, which nobody has split "
            "yet: Plan.data_parallel(graph, world_size), Plan.hybrid or search(graph, machine) "
            "give one"
        )
    raise PlanError(
        f"{asker} needs a Plan or an Experiment, got {_said(given)}; "
        "Plan.data_parallel(trace(model, input_shape), world_size) is a plan"
    )


def required_machine(asker: str, given: Any) -> Machine:
    """The machine that is given."""
    if isinstance(given, Machine):
        return given
    raise MachineError(
        f"{asker} needs a Machine: cluster.calibrate() measures one, and Machine.preset(name) "
        f"knows {', '.join(Machine.presets())}; got {_said(given)}"
    )


def experiment_of(
    asker: str,
    given: Any,
    plan: Plan,
    experiment: Any,
    *,
    batch_size: int | None = None,
    optimizer: Optimizer | str | None = None,
    precision: str | None = None,
) -> Experiment:
    """The experiment of a plan: the one that is given, or else a `usual` step."""
    if isinstance(given, Experiment):
        if experiment is not None:
            raise ExperimentError(f"{asker} takes one Experiment, got two")
        experiment = given
    if experiment is None:
        experiment = usual(plan)
    if not isinstance(experiment, Experiment):
        raise ExperimentError(
            f"{asker}: experiment must be an Experiment or None, got {_said(experiment)}; "
            "the order is plan or graph, machine, experiment, and all else by name"
        )
    asked = {"batch_size": batch_size, "optimizer": optimizer, "precision": precision}
    fields = {name: value for name, value in asked.items() if value is not None}
    if experiment.plan is plan and not fields:
        return experiment
    return experiment.replace(**fields, plan=plan)


ROWS = 32
"""The samples of each rank in a usual step."""


def usual(plan: Plan) -> Experiment:
    """A step to predict where no experiment is given: momentum SGD, 32 samples for each rank."""
    rows = ROWS * plan.world_size
    return Experiment(
        plan=plan,
        data=Synthetic(samples=max(rows, 1024)),
        batch_size=rows,
        optimizer=SGD(lr=0.01, momentum=0.9),
        steps=1,
    )


def _said(given: Any) -> str:
    """What was given, in few words: None, 3, 'text', or the name of its type."""
    small = given is None or isinstance(given, str | int | float)
    return repr(given) if small else f"a value of type {type(given).__name__}"
