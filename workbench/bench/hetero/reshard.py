"""The cost of resharding a running model, against copies of the same bytes between its ranks.

A model with momentum, from equal filters to unequal ones and back. In turns with every resharding,
each rank sends each other one as many bytes as it did then, from one flat buffer into another: the
time of the transfer alone.

    recut_vs_copy         seconds of a re-cut, over those of the copies
    recut_vs_predicted    bytes that ranks received, over those foreseen: 1
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from workbench.bench.hetero.static import Found
from workbench.bench.nets import INPUT_SHAPE, CifarNet
from workbench.bench.report import Cell, Figure
from workbench.client.cluster import Cluster
from workbench.comm.collectives import all_gather, all_to_all_v
from workbench.comm.groups.group import Group
from workbench.comm.groups.world import RankConfig, World
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.plan import Plan
from workbench.plan.plans.reshard import Reshard
from workbench.train.run.rank import RankState, group_specs_of
from workbench.train.run.reshard import resharded_bytes, under

UNEQUAL = (4, 2, 1, 1)
_STATES = 1  # momentum


@dataclass(frozen=True)
class Measured:
    """The measurements of one rank.

    Attributes:
        recut_s: the seconds of every resharding, on the slowest rank.
        copy_s: the seconds of copies of the same bytes, on the slowest rank.
        received: the bytes that this rank received in every resharding.
    """

    recut_s: tuple[float, ...]
    copy_s: tuple[float, ...]
    received: tuple[int, ...]


def run(cluster: Cluster, model: str, *, rounds: int) -> Found:
    """Measures resharding.

    Args:
        cluster: the cluster, all of whose engines take part.
        model: the name of a torchvision model; "": a small network.
        rounds: the number of reshardings there and back.
    """
    world, module = len(cluster), None if model else CifarNet(4)
    graph = trace(module or model, input_shape=INPUT_SHAPE, num_classes=10)
    equal, unequal = (Plan.filters(graph, world, s) for s in (None, UNEQUAL[:world]))
    experiment = Experiment(
        plan=equal,
        data=Synthetic(samples=2 * world),
        batch_size=2 * world,
        optimizer=SGD(lr=1e-4, momentum=0.9),
        steps=1,
    )
    task, text = f"{__name__}:measure", unequal.to_toml()
    found: list[Measured] = cluster.call(task, experiment, module=module, plan=text, rounds=rounds)
    states = dict.fromkeys(graph.trainable, _STATES)
    foreseen = [
        [4 * Reshard(*way).received(rank, states) for way in ((equal, unequal), (unequal, equal))]
        for rank in range(world)
    ]
    ratios = [
        own / foreseen[rank][index % 2]
        for rank, one in enumerate(found)
        for index, own in enumerate(one.received)
        if foreseen[rank][index % 2]
    ]
    pairs = list(zip(found[0].recut_s, found[0].copy_s, strict=True))
    rows = tuple[dict[str, Cell], ...](
        {
            "re-cut": way,
            "MiB moved": sum(one.received[first] for one in found) / 2**20,
            "re-cut s": statistics.median(s for s, _ in pairs[first::2]),
            "copies s": statistics.median(s for _, s in pairs[first::2]),
        }
        for first, way in enumerate(("equal to unequal", "back"))
    )
    figures = {
        "recut_vs_copy": Figure.of([recut / copy for recut, copy in pairs]),
        "recut_vs_predicted": Figure.of(ratios),
    }
    note = (
        f"Re-cuts of {graph.source.name} ({graph.parameters:,} parameters, with momentum) on "
        f"{world} engines, from equal filters to {':'.join(map(str, UNEQUAL[:world]))} and back."
    )
    return Found(rows, figures, (note,))


def measure(
    config: RankConfig, experiment: Experiment, *, weights: Path, plan: str, rounds: int
) -> Measured:
    """Measures on one engine: reshardings to a plan and back, and copies in turns with them.

    Args:
        config: the rank's number, device and connection to the others.
        experiment: the experiment, with the first plan.
        weights: the file of initial weights.
        plan: the second plan, as TOML.
        rounds: the number of times there and back; one more warms up.
    """
    plans = (Plan.from_toml(plan, experiment.plan.graph), experiment.plan)
    recut_s, copy_s, received = list[float](), list[float](), list[int]()
    with World.open(config) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        state = RankState.start(experiment, world, groups, weights, None)
        for done in range(1, 2 * rounds + 3):
            state.stepper.run(done)
            state.stepper.update()
            sizes = _elements(state.experiment.plan, plans[(done - 1) % 2])
            began, before = _together(state.everyone), resharded_bytes(world.recorder)
            state = under(state, plans[(done - 1) % 2], done)
            recut_s.append(_slowest(time.perf_counter() - began, state.everyone))
            received.append(resharded_bytes(world.recorder) - before)
            copy_s.append(_copied(sizes, state.everyone))
    return Measured(tuple(recut_s[2:]), tuple(copy_s[2:]), tuple(received[2:]))


def _elements(before: Plan, after: Plan) -> list[list[int]]:
    """The elements of weights and momentum that each rank sends to each other [ranks, ranks]."""
    world = before.world_size
    sizes = [[0] * world for _ in range(world)]
    trainable = {name for name, placed in before.flow.weights.items() if placed.trainable}
    for move in Reshard(before, after).moves:
        sizes[move.source][move.target] += move.numel * (1 + _STATES * (move.name in trainable))
    return sizes


def _copied(sizes: Sequence[Sequence[int]], everyone: Group) -> float:
    """Seconds of exchanging so many elements, from existing flat memory to new memory."""
    flat = torch.zeros(sum(sizes[everyone.rank]))
    began = _together(everyone)
    all_to_all_v(flat, sizes, everyone, layer="bench")
    return _slowest(time.perf_counter() - began, everyone)


def _together(everyone: Group) -> float:
    """The time at which all ranks have arrived."""
    _slowest(0.0, everyone)
    return time.perf_counter()


def _slowest(seconds: float, everyone: Group) -> float:
    mine = torch.tensor([seconds], dtype=torch.float64)
    return float(all_gather(mine, Shard(0, (1,) * everyone.size), everyone, layer="bench").max())
