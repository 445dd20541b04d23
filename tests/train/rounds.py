"""Nets with a sharded tail, and one step of them in rounds."""

import itertools
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from tests.layers import nets
from workbench.comm.world import World
from workbench.layers.context import BatchContext
from workbench.layers.cut_model import CutModel
from workbench.layers.dropout import PlacedDropout
from workbench.layers.rounds import PartedModel, Round
from workbench.plan.layout import ROWS
from workbench.plan.placement import Shard
from workbench.plan.plan import Plan
from workbench.plan.tail import Tail
from workbench.train.batch import MicroBatch
from workbench.train.gradients import GradientSum
from workbench.train.memory import PeakMeter, tensor_bytes
from workbench.train.objective import own_rows
from workbench.train.passes import RoundsPass, pass_of


class Picture(nn.Module):
    """Convolutions and batch norm before the gather, dropout behind it."""

    shape = (3, 6, 6)

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 11),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
            nn.Linear(11, 9),
            nn.Dropout(0.4),
            nn.GELU(),
            nn.Linear(9, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.features(x)))


class Wide(nn.Module):
    """Nearly all activations in the tail."""

    shape = (16,)

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.tail = nn.Sequential(
            nn.Linear(32, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.head(x))


def nothing(*_: int) -> None:
    """Gradients of rounds add up."""


def one_step(
    world: World, plan: Plan, net: type[nn.Module], rows: tuple[int, ...]
) -> tuple[Tensor, float, dict[str, Tensor], list[tuple[object, ...]]]:
    """One step on this rank: own outputs, loss, gradients, traffic."""
    model = nets.cut_net(world, plan, net, rows)
    gradients = GradientSum(model, bucket_bytes=600)
    images, labels = nets.batch(net, sum(rows))
    span = Shard(0, rows).span(world.rank)
    batch = MicroBatch(rows, 0, images.narrow(0, *span), labels.narrow(0, *span))
    model.context.set((0,) * world.size)
    gradients.begin()
    outputs, reported = pass_of(model, nullcontext, nothing).run(
        batch, 0, sum(rows), gradients.last
    )
    gradients.finish()
    traffic = [(r.op, r.layer, r.phase, r.messages, r.bytes) for r in world.recorder.rows()]
    with torch.no_grad():
        mine = own_rows(model, plan.graph.outputs[0], outputs[0])
    found = {  # an empty piece may have none
        name: p.grad.clone() if p.numel() else p.detach() for name, p in model.trainable().items()
    }
    return mine, reported, found, traffic


def peak_of_a_step(world: World, plan: Plan, net: type[nn.Module], rows: tuple[int, ...]) -> int:
    """Bytes that a step, not the first, needs beyond what stays alive."""
    with PeakMeter(world.device) as meter:
        model = nets.cut_net(world, plan, net, rows)
        images, labels = nets.batch(net, sum(rows))
        span = Shard(0, rows).span(world.rank)
        batch = MicroBatch(rows, 0, images.narrow(0, *span), labels.narrow(0, *span))
        passing = pass_of(model, nullcontext, nothing)
        peaks = []
        for step in range(5):
            kept = [*model.pieces().values(), images, labels]
            kept += [p.grad for p in model.trainable().values() if p.grad is not None]
            before = meter.lap(live_bytes=tensor_bytes(kept)).live_bytes
            passing.run(batch, step, sum(rows), lambda: None)
            peaks.append(meter.lap().peak_bytes - before)
        return min(peaks[1:])  # a thread of gloo may free a buffer unseen


def masks(net: type[nn.Module], plan: Plan, model: nn.Module, count: int) -> None:
    """Gives a whole model the masks of a split one."""
    context = BatchContext(0, (count,), seed=nets.SEED)
    for layer in plan.graph.layers:
        if layer.kind == "dropout":
            p = model.get_submodule(layer.name).p
            shape = layer.input_shape
            placed = PlacedDropout(p, ROWS, shape, layer.rows, layer.name, context)
            model.set_submodule(layer.name, placed)


def sent_in_rounds(
    world: World, plan: Plan, net: type[nn.Module], rows: tuple[int, ...]
) -> list[tuple[int, int]]:
    """For each round, the messages and bytes of the gather that this rank receives."""
    model = nets.cut_net(world, plan, net, rows)
    images, labels = nets.batch(net, sum(rows))
    span = Shard(0, rows).span(world.rank)
    batch = MicroBatch(rows, 0, images.narrow(0, *span), labels.narrow(0, *span))
    assert plan.tail is not None
    parted = Counting(model, plan.tail)
    RoundsPass(parted, nullcontext, nothing).run(batch, 0, sum(rows), lambda: None)
    return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise([(0, 0), *parted.seen])]


class Counting(PartedModel):
    """Notes what has been received after each start of a round's gather."""

    def __init__(self, model: CutModel, tail: Tail) -> None:
        super().__init__(model, tail)
        self.seen: list[tuple[int, int]] = []

    def start(self, part: Tensor, brought: Round) -> None:
        super().start(part, brought)
        recorder = self.model.shard_group(self.tail.group_size).recorder
        found = [r for r in recorder.rows() if (r.layer, r.phase) == ("tail.0", "forward")]
        assert [r.op for r in found] == ["all_gather"]
        self.seen.append((found[0].messages, found[0].bytes))
