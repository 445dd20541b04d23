"""How long predictions take, in processor time: widgets ask for one at every move of a mouse."""

import statistics
import time
from collections.abc import Callable

from workbench.bench.report import Figure
from workbench.model.trace import trace
from workbench.plan.experiment import SGD, Experiment
from workbench.plan.graph import Graph
from workbench.plan.machine import Machine
from workbench.plan.plan import Plan
from workbench.predict.prediction import predict

WORLD, FAR = 8, 65_536


def resnet152() -> Graph:
    """For images of 224 x 224 in 1,000 classes."""
    return trace("resnet152", input_shape=(3, 224, 224), num_classes=1000)


def figures(graph: Graph, times: int) -> dict[str, Figure]:
    """Of memory, traffic and time of a hybrid plan on 8 ranks, and of memory and time on 65,536.

    Args:
        graph: of the plan.
        times: how often each is predicted.
    """
    plan, machine = Plan.hybrid(graph, WORLD), Machine.preset("h100-nvlink")
    experiment = Experiment(
        plan=plan, optimizer=SGD(lr=0.1, momentum=0.9), steps=1, batch_size=8 * FAR
    )

    def near() -> None:
        prediction = predict(plan, machine, experiment)
        _ = prediction.memory, prediction.traffic, prediction.step_time

    def far() -> None:
        prediction = predict(plan, machine, experiment).at(world_size=FAR)
        _ = prediction.memory, prediction.step_time

    return {
        "predict_ms": _figure(near, 1e3, times),
        "at_65536_s": _figure(far, 1.0, times),
    }


def _figure(call: Callable[[], None], unit: float, times: int) -> Figure:
    taken = []
    for _ in range(times):
        began = time.process_time()
        call()
        taken.append((time.process_time() - began) * unit)
    return Figure(statistics.median(taken), min(taken), max(taken))
