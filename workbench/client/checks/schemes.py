"""What a scheme is checked for: what it states, and real runs on a cluster against one process."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workbench.client.cluster import Cluster
from workbench.model.record.extended import TransposedLinear
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.extension.extension import Check
from workbench.plan.graph.graph import Graph
from workbench.plan.io.errors import ExperimentError, PlanError
from workbench.plan.machine.machine import Machine
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.schemes import Scheme
from workbench.plan.plans.plan import Plan
from workbench.predict.prediction import predict
from workbench.store.errors import RunError

_TAKEN = "it takes a layer, and can divide it"
_STEADY = "it states the same each time"
_FLOPS = "the shares of the operations are the whole"
_EXACT = "a split model is exact, and leaves the same bits when it is trained again"
_UNEQUAL = "a split model is exact with unequal shares, and where a rank has none"
_TRAFFIC = "what every rank receives is what is predicted, to the byte"
_STEPS, _TRACE_EVERY, _ASKED = 8, 2, 10


def _transposed(features: int) -> nn.Module:
    """A linear layer whose matrix is [in_features, out_features], as GPT-2's; a square one.

    A scheme that ignores `Layer.transposed` makes a plan for it, and computes something else.
    """
    weight = nn.Parameter(torch.randn(features, features))
    return TransposedLinear(weight, nn.Parameter(torch.randn(features)))


# Small layers of many kinds: a module, and the shape of one sample.
_SMALL: tuple[tuple[Callable[[], nn.Module], tuple[int, ...]], ...] = (
    (lambda: nn.Linear(12, 8), (12,)),
    (lambda: nn.Linear(12, 8, bias=False), (5, 12)),
    (lambda: _transposed(12), (5, 12)),
    (lambda: nn.Conv1d(4, 8, 3, padding=1), (4, 6)),
    (lambda: nn.Conv2d(4, 8, 3, padding=1), (4, 5, 5)),
    (lambda: nn.Conv2d(8, 8, 3, groups=4), (8, 5, 5)),
    (lambda: nn.Conv3d(4, 8, 3, padding=1), (4, 3, 3, 3)),
    (lambda: nn.ConvTranspose1d(4, 8, 2, stride=2), (4, 6)),
    (lambda: nn.ConvTranspose2d(4, 8, 2, stride=2), (4, 5, 5)),
    (lambda: nn.GroupNorm(4, 8), (8, 5)),
    (lambda: nn.LayerNorm(12), (5, 12)),
    (lambda: nn.PReLU(8), (8, 5)),
    (lambda: nn.Softmax(dim=-1), (8, 5)),
    (lambda: nn.AvgPool1d(2), (8, 6)),
)


@dataclass(frozen=True)
class SmallModel:
    """A small classifier in which layer "1" takes a scheme; weights before it need gradients."""

    module: nn.Module
    graph: Graph

    def plan(self, scheme: Scheme, size: int, shares: tuple[float, ...] | None = None) -> Plan:
        """Returns a plan of one group.

        Raises:
            PlanError: the layer cannot be divided.
        """
        return Plan(self.graph, size, {"1": LayerPlan(scheme, size, shares)})

    def unequal(self, scheme: Scheme, size: int) -> list[Plan]:
        """Returns plans with unequal shares, as far as the scheme has any, and none for a rank."""
        plans = []
        for shares in (tuple(range(1, size + 1)), (0, *(1,) * (size - 1))):
            with suppress(PlanError):  # it divides nothing, or every rank needs a part
                plans.append(self.plan(scheme, size, shares))
        return plans


def small_models(scheme: Scheme, size: int) -> list[SmallModel]:
    """The models that take a scheme in a group of a size."""
    found = []
    choice = LayerPlan(scheme, size)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for make, shape in _SMALL:
            layer = make()
            width = layer(torch.zeros(1, *shape)).numel()
            first = nn.Linear(shape[-1], shape[-1])
            module = nn.Sequential(first, layer, nn.Flatten(), nn.Linear(width, 10))
            graph = trace(module, input_shape=shape)
            if choice.meant.takes(graph["1"]):
                found.append(SmallModel(module, graph))
    return found


def checks_of(scheme: Scheme, cluster: Cluster) -> Iterator[list[Check]]:
    """Yields the checks of what a scheme states, and then those on engines.

    Args:
        cluster: its engines, two or more, which are one group.
    """
    size = len(cluster)
    try:
        models = small_models(scheme, size)
        plans = [model.plan(scheme, size) for model in models]
    except Exception as error:  # whatever its own code raises
        yield [Check(_TAKEN, False, f"{type(error).__name__}: {error}")]
        return
    if not models:
        small = ", ".join(dict.fromkeys(type(make()).__name__ for make, _ in _SMALL))
        yield [Check(_TAKEN, False, f"it took none of the layers that are tried: {small}")]
        return
    names = ", ".join(dict.fromkeys(plan.graph["1"].target for plan in plans))
    plans += [plan for model in models for plan in model.unequal(scheme, size)]
    yield [
        Check(_TAKEN, True, names),
        _check(_STEADY, _stated_wrong(_capricious, plans)),
        _check(_FLOPS, _stated_wrong(_left_out, plans)),
    ]
    yield cluster_checks_of(scheme, cluster, models)


def cluster_checks_of(
    scheme: Scheme, cluster: Cluster, models: Sequence[SmallModel]
) -> list[Check]:
    """Checks a scheme on engines, in each of some models."""
    size = len(cluster)
    equal = [(model.plan(scheme, size), model.module) for model in models]
    unequal = [(plan, model.module) for model in models for plan in model.unequal(scheme, size)]
    return [
        _check(_EXACT, [_inexact(cluster, *each, repeat=True) for each in equal]),
        _check(_UNEQUAL, [_inexact(cluster, *each, repeat=False) for each in unequal]),
        _check(_TRAFFIC, [_unpredicted(cluster, *each) for each in equal]),
    ]


def _check(what: str, complaints: Sequence[str]) -> Check:
    first = next(filter(None, complaints), "")
    return Check(what, not first, first or f"{len(complaints)} plans of small models")


def _stated_wrong(find: Callable[[Plan], str], plans: Sequence[Plan]) -> list[str]:
    complaints = []
    for plan in plans:
        try:
            complaints.append(find(plan))
        except PlanError as error:  # it was none when the plan was made
            complaints.append(f"{plan!r}: {error}")
    return complaints


def _capricious(plan: Plan) -> str:
    layer, choice = plan.graph["1"], plan.layers["1"]
    division = choice.division(layer)

    def stated() -> list[Any]:
        read, given = choice.meant.layouts(layer, division, None)
        held = [choice.meant.holds(layer, weight, division, read) for weight in layer.weights]
        return [read, given, *held]

    first = stated()
    same = all(stated() == first for _ in range(_ASKED))
    return "" if same else f"{plan!r}: asked again, it states different placements"


def _left_out(plan: Plan) -> str:
    """Where the shares of the operations are less than the whole."""
    layer, choice = plan.graph["1"], plan.layers["1"]
    division = choice.division(layer)
    read, given = choice.meant.layouts(layer, division, None)
    shares = [
        choice.meant.flops(layer, division, member, read, given)
        for member in range(choice.group_size)
    ]
    return "" if sum(shares) >= 1 - 1e-10 else f"{plan!r}: shares {shares} are less than the whole"


def _inexact(cluster: Cluster, plan: Plan, module: nn.Module, *, repeat: bool) -> str:
    try:
        found = cluster.verify(plan, module=module, repeat=repeat)
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
