"""What a scheme is checked for on the ranks of a cluster: a real run against one process."""

from collections.abc import Sequence

from torch import nn

from workbench.client.cluster import Cluster
from workbench.model.tracing.trace import trace
from workbench.plan.errors import ExperimentError, PlanError
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.extension.extension import Check
from workbench.plan.machine.machine import Machine
from workbench.plan.placement.choice import LayerPlan
from workbench.plan.placement.schemes import Scheme
from workbench.plan.plan import Plan
from workbench.predict.prediction import predict
from workbench.store.errors import RunError

_EXACT = "a split model is exact, and leaves the same bits when it is trained again"
_TRAFFIC = "what every rank receives is what is predicted, to the byte"
_STEPS, _TRACE_EVERY = 8, 2


def cluster_checks_of(
    scheme: Scheme, cluster: Cluster, models: Sequence[tuple[nn.Module, tuple[int, ...]]]
) -> list[Check]:
    """Checks a scheme in all layers that take it, in one group of all engines.

    Args:
        scheme: the scheme.
        cluster: its engines, two or more.
        models: classifiers, with the shapes of their samples.
    """
    plans = []
    for module, shape in models:
        plan = Plan.data_parallel(trace(module, input_shape=shape), len(cluster))
        for layer in plan.graph.layers:
            if LayerPlan(scheme).meant.takes(layer) and layer.name not in plan.graph.shares_weights:
                plan = plan.with_layer(layer.name, scheme=scheme)
        plans.append((plan, module))
    return [
        _check(_EXACT, [_inexact(cluster, plan, module) for plan, module in plans]),
        _check(_TRAFFIC, [_unpredicted(cluster, plan, module) for plan, module in plans]),
    ]


def _check(what: str, complaints: Sequence[str]) -> Check:
    found = [complaint for complaint in complaints if complaint]
    return Check(what, not found, found[0] if found else f"{len(complaints)} models")


def _inexact(cluster: Cluster, plan: Plan, module: nn.Module) -> str:
    try:
        found = cluster.verify(plan, module=module)
    except (RunError, ExperimentError, PlanError) as error:
        return f"{plan!r}: {error}"
    return "" if found.exact else f"{plan!r}: {found}"


def _unpredicted(cluster: Cluster, plan: Plan, module: nn.Module) -> str:
    """Where a rank received something else in the traced steps of a run."""
    experiment = Experiment(
        plan=plan,
        data=Synthetic(samples=64, classes=plan.graph.num_classes),
        batch_size=8 * plan.world_size,
        optimizer=SGD(lr=0.01),
        steps=_STEPS,
        trace_every=_TRACE_EVERY,
    )
    try:
        run = cluster.train(experiment, module=module).wait()
        machine = Machine.preset("cpu-10gbe").replace(ranks_per_host=None)
        compared = run.compare(predict(run.experiment, machine))
    except (RunError, ExperimentError, PlanError) as error:
        return f"{plan!r}: {error}"
    if len(compared.ranks) != plan.world_size:
        return f"{plan!r}: no step of every rank was traced"
    for rank in compared.ranks:
        pair = rank.received_bytes
        if pair.measured != pair.predicted:
            return (
                f"{plan!r}: rank {rank.rank} received {pair.measured:,.0f} bytes, and "
                f"{pair.predicted:,.0f} were predicted"
            )
    return ""
