"""Ways to the cross-entropy of scores that are cut by classes, each on one rank as a step.

    workbench             over the cut scores: what travels is a few numbers for each label
    scores gathered       every rank gets the scores of all classes of all rows
    scores by rows        every rank gets the scores of all classes of its own rows, and its
                          gradient goes back: two all-to-alls
    torch loss_parallel   DTensor's, over the cut scores

A step is the forward and the backward pass, from scores that are there to their gradient.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as DTensorShard
from torch.distributed.tensor.parallel import loss_parallel

from workbench.bench.rivals.rivals import Side
from workbench.comm.groups.group import Group
from workbench.comm.groups.world import World
from workbench.comm.regions import exchange, gather_from
from workbench.layers.local.loss import cross_entropy_sum, cut_cross_entropy_sum
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.placement.placement import Shard, apportion

WAYS = ("workbench", "scores gathered", "scores by rows", "torch loss_parallel")


def loss_sides(way: str, experiment: Experiment, world: World, group: Group) -> list[Side]:
    """One way, on this rank, at the sizes of a language model.

    Args:
        way: one of `WAYS`.
        experiment: the experiment, whose model's output has the classes [tokens, classes], and
            whose batch the rows.
        world: the world of this rank.
        group: all ranks, which cut the classes.
    """
    graph = experiment.plan.graph
    tokens, extent = graph[graph.outputs[0]].output_shape
    labels_of_all = experiment.batch_size * tokens
    even = (1,) * group.size
    classes = Shard(1, apportion(extent, even))
    rows = Shard(0, apportion(labels_of_all, even))
    generator = torch.Generator().manual_seed(experiment.seed)  # the same on all ranks
    labels = torch.randint(extent, (labels_of_all,), generator=generator).to(world.device)
    generator.manual_seed(experiment.seed + 1 + world.rank)
    held = classes.sizes[world.rank]
    mine = torch.randn(labels_of_all, held, generator=generator).to(world.device).requires_grad_()

    def over_cut() -> Tensor:
        return cut_cross_entropy_sum(mine, labels, classes, group) / group.size

    def gathered() -> Tensor:
        return cross_entropy_sum(gather_from(mine, classes, group), labels) / group.size

    def by_rows() -> Tensor:
        own = labels.narrow(0, *rows.span(group.rank))
        return cross_entropy_sum(exchange(mine, classes, rows, group), own)

    def parallel() -> Tensor:
        scores = DTensor.from_local(mine, mesh, [DTensorShard(1)], run_check=False)
        return F.cross_entropy(scores, labels, reduction="sum") / group.size

    def step(loss_of: Callable[[], Tensor]) -> float:
        mine.grad = None
        loss = loss_of() / labels_of_all
        loss.backward()
        return loss.item()

    match way:
        case "workbench":
            return [Side(way, lambda _: step(over_cut), labels_of_all)]
        case "scores gathered":
            return [Side(way, lambda _: step(gathered), labels_of_all)]
        case "scores by rows":
            return [Side(way, lambda _: step(by_rows), labels_of_all)]
    mesh = init_device_mesh(world.device.type, (world.size,))

    def parallel_step(_index: int) -> float:
        with loss_parallel():
            return step(parallel)

    return [Side(way, parallel_step, labels_of_all)]
