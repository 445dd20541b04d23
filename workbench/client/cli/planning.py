"""`predict`, `program` and `verify`."""

from argparse import Namespace
from pathlib import Path

from workbench.client.cluster import Cluster
from workbench.plan.errors import ExperimentError
from workbench.plan.experiment import SGD, Experiment
from workbench.plan.machine import Machine
from workbench.plan.plan import Plan
from workbench.predict.prediction import predict as predicted
from workbench.program.step import program as programmed


def predict(options: Namespace) -> int:
    """Prints memory and traffic, and with a machine the time, of a step."""
    experiment = _experiment(options.plan, options.batch_size, options.precision)
    machine = None if options.machine is None else _machine(options.machine)
    print(predicted(experiment.plan, machine, experiment))
    return 0


def program(options: Namespace) -> int:
    """Prints what ranks execute in one step, an instruction on each line."""
    found = programmed(_experiment(options.plan, options.batch_size, options.precision))
    if options.rank is None:
        print(found)
        return 0
    try:
        print(found.of(options.rank))
    except IndexError as error:
        raise ValueError(str(error)) from None
    return 0


def verify(options: Namespace) -> int:
    """Prints how far the split model is from the unsplit one; fails where it is not exact."""
    plan = _experiment(options.plan, 1, "fp32").plan
    with Cluster(plan.world_size, directory=options.directory) as cluster:
        found = cluster.verify(plan, steps=options.steps, precision=options.precision)
    print(found)
    return 0 if found.exact else 1


def _experiment(path: Path, batch_size: int, precision: str) -> Experiment:
    """What a file holds; a plan alone is given a batch."""
    try:
        return Experiment.load(path)
    except ExperimentError:
        plan = Plan.load(path)
    size = max(batch_size, plan.world_size)
    plain = Experiment(plan=plan, batch_size=size, optimizer=SGD(lr=0.01), steps=1)
    return plain.replace(precision=precision)


def _machine(name: str) -> Machine:
    return Machine.load(name) if Path(name).exists() else Machine.preset(name)
