"""The checked arguments of a search: which plans count, in which experiment, on which machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from workbench.plan.experiment.experiment import Experiment, Optimizer
from workbench.plan.experiment.question import experiment_of, required_machine
from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.io.errors import MachineError, PlanError
from workbench.plan.machine.machine import Machine
from workbench.plan.placement.layer_plan import LayerPlan, check
from workbench.plan.plans.plan import Plan
from workbench.predict.search.choices import (
    Pin,
    Shares,
    checked_sizes,
    options_of,
    own_schemes,
    pinned,
    ways_to_share,
)
from workbench.predict.search.trellis import Floats
from workbench.predict.time.duration import Speeds, layer_seconds
from workbench.program.rows import Rows, micro_batches

_DIFFERENT = 0.02  # devices whose speeds differ by less are taken to be equal


@dataclass(frozen=True)
class Question:
    """The checked arguments of a search.

    Attributes:
        experiment: the experiment for which plans are compared; its own plan is data-parallel.
        limit: the memory limit of a rank, in bytes.
        weights: the weight of each rank in the mean of times, its relative speed [ranks].
        recompute: whether layers may be recomputed in the backward pass.
        seconds: the seconds after which a search among many plans returns what it has; None: once
            it finds no better ones.
    """

    experiment: Experiment
    machine: Machine
    limit: int
    sizes: tuple[int, ...]
    options: Mapping[str, tuple[LayerPlan, ...]]
    ways: tuple[Mapping[str, LayerPlan], ...]
    weights: Floats
    pinned: Mapping[str, Pin]
    recompute: bool
    seconds: float | None

    @property
    def graph(self) -> Graph:
        """The model."""
        graph: Graph = self.experiment.plan.graph
        return graph

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self.experiment.plan.world_size)

    @property
    def plans(self) -> int:
        """The number of combinations of schemes, group sizes and shares."""
        count = len(self.ways)
        for name, options in self.options.items():
            if name not in self.ways[0]:
                count *= len(options)
        return count

    def plan(self, choices: Mapping[str, LayerPlan], again: Sequence[str] = ()) -> Plan:
        """The plan of these choices, with these layers recomputed."""
        layers = {name: choice for name, choice in choices.items() if choice != LayerPlan()}
        for name in again:
            layers[name] = replace(layers.get(name, LayerPlan()), recompute=True)
        return replace(self.experiment.plan, layers=layers)

    def may_recompute(self, layer: Layer) -> bool:
        """Whether a layer may be recomputed in the backward pass."""
        pin = self.pinned.get(layer.name)
        pinned = isinstance(pin, LayerPlan) and pin.recompute
        if not (self.recompute or pinned) or layer.rows == 0:
            return False
        try:
            check(layer, LayerPlan(recompute=True), self.world_size)
        except PlanError:
            return False
        return True


def question_of(
    graph: Graph | Plan | Experiment,
    machine: Machine,
    world_size: int | None,
    limit: int | None,
    *,
    experiment: Experiment | None,
    batch_size: int | None,
    optimizer: Optimizer | str | None,
    precision: str | None,
    pin: Mapping[str, Pin] | None,
    group_sizes: Sequence[int] | None,
    shares: Sequence[Shares] | bool,
    recompute: bool,
    seconds: float | None,
    schemes: Sequence[object] = (),
) -> Question:
    """Checks the arguments of `search`.

    Raises:
        MachineError: no machine, or one of another world size.
        PlanError: no model or number of ranks, or an invalid pin, group size or shares.
        ExperimentError: an invalid experiment, or one for another kind of plan.
    """
    if not isinstance(graph, Graph | Plan | Experiment):
        raise PlanError(f"search needs a Graph, as trace() gives one, or a Plan, got {graph!r}")
    machine = required_machine("search", machine)
    plan = _over(graph, machine, experiment, world_size)
    world = plan.world_size
    if len(machine.devices) not in (1, world):
        raise MachineError(
            f"machine {machine.name!r} has {len(machine.devices)} devices, one for each rank, "
            f"and the search is for {world} ranks; calibrate a cluster of that size"
        )
    sizes = checked_sizes(world, group_sizes)
    experiment = experiment_of(
        "search",
        graph,
        plan,
        experiment,
        batch_size=batch_size,
        optimizer=optimizer,
        precision=precision,
    )
    speeds = _speeds(experiment, machine)
    pins = pinned(plan.graph, pin or {})
    cuts, own = _shares(speeds, sizes, shares), own_schemes(schemes)
    options = options_of(plan.graph, world, sizes, cuts, pins, own)
    if limit is None:
        limit = min(device.memory_bytes for device in machine.devices)
    weights = speeds / speeds.sum()
    if seconds is not None and not seconds > 0:
        raise PlanError(f"time_limit must be a positive number of seconds, got {seconds!r}")
    ways = ways_to_share(plan.graph, world, options)
    return Question(
        experiment, machine, limit, sizes, options, ways, weights, pins, recompute, seconds
    )


def _over(
    given: Graph | Plan | Experiment,
    machine: Machine,
    experiment: Experiment | None,
    world_size: int | None,
) -> Plan:
    """The model, replicated on every rank that is searched for.

    Raises:
        PlanError: nothing says how many ranks there are.
    """
    own = given.plan if isinstance(given, Experiment) else given
    like = own if isinstance(own, Plan) else None
    if like is None and isinstance(experiment, Experiment):
        like = experiment.plan
    if world_size is None:
        if like is not None:
            world_size = like.world_size
        elif len(machine.devices) > 1:
            world_size = len(machine.devices)
        else:
            raise PlanError(
                "search needs a number of ranks: search(graph, machine, world_size=4), since "
                f"machine {machine.name!r} describes one device for any number of ranks"
            )
    graph = own.graph if isinstance(own, Plan) else own
    plan = Plan.data_parallel(graph, world_size)
    return plan if like is None else plan.with_batch_norm(like.batch_norm)


def _speeds(experiment: Experiment, machine: Machine) -> Floats:
    """The relative speed of each rank, from its time for equal shares of the model [ranks]."""
    plan: Plan = experiment.plan
    if len(machine.devices) == 1:
        return np.ones(plan.world_size)
    rows = Rows(micro_batches(experiment)[0])
    speeds = Speeds(machine, range(plan.world_size))
    seconds = np.zeros(plan.world_size)
    for layer in plan.graph.layers:
        if layer.rows:
            found = layer_seconds(plan, layer, rows, experiment.precision, speeds)
            seconds += (found.forward + found.backward) / np.maximum(rows.own, 1)
    found_speeds: Floats = seconds.min() / seconds
    if found_speeds.min() > 1 - _DIFFERENT:
        return np.ones(plan.world_size)
    return found_speeds


def _shares(
    speeds: Floats, sizes: Sequence[int], shares: Sequence[Shares] | bool
) -> dict[int, list[tuple[float, ...]]]:
    """The unequal shares to consider, for each group size."""
    found: dict[int, list[tuple[float, ...]]] = {}
    if shares is False:
        return found
    if shares is not True:
        for some in shares:
            if len(some) not in sizes:
                raise PlanError(
                    f"shares {tuple(some)} are for {len(some)} ranks; groups have "
                    f"{', '.join(map(str, sizes))}"
                )
            found.setdefault(len(some), []).append(tuple(some))
        return found
    for k in sizes:
        groups = {tuple(group) for group in np.round(speeds.reshape(-1, k), 3).tolist()}
        found[k] = [group for group in sorted(groups) if k > 1 and len(set(group)) > 1]
    return found
