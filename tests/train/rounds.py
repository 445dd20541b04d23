"""A net with a sharded tail, and what a step of it in rounds needs and sends."""

import gc
import itertools
import statistics

from torch import Tensor, nn

from tests.layers import nets
from tests.train.runs import stepper_of
from workbench.comm.groups.world import World
from workbench.layers.cut_model import CutModel
from workbench.layers.rounds import PartedModel, TailRound
from workbench.plan.experiment.experiment import SGD, Experiment, LocalSGD, Synthetic
from workbench.plan.placement.placement import Shard
from workbench.plan.placement.rounds import Tail
from workbench.plan.plans.plan import Plan
from workbench.train.data.feed import MicroBatch
from workbench.train.run.memory import PeakMeter, tensor_bytes
from workbench.train.step.executor import Stepper


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


def stepper(world: World, model: CutModel) -> Stepper:
    """Every rank keeps its own gradients."""
    samples = 64 * world.size
    run = Experiment(
        plan=model.plan,
        optimizer=SGD(lr=0.1),
        steps=1,
        batch_size=samples,
        data=Synthetic(samples=samples, classes=5),
        sync=LocalSGD(),
        precision="fp64",
    )
    return stepper_of(world, model, run, sums=False)


def peak_of_a_step(world: World, plan: Plan, net: type[nn.Module], rows: tuple[int, ...]) -> int:
    """Bytes that a step, not the first, needs beyond what stays alive."""
    gc.collect()  # what is freed in the midst of a step counts as less
    with PeakMeter(world.device) as meter:
        model = nets.cut_net(world, plan, net, rows)
        images, labels = nets.batch(net, sum(rows))
        span = Shard(0, rows).span(world.rank)
        batch = MicroBatch(rows, 0, (images.narrow(0, *span),), labels.narrow(0, *span))
        steps = stepper(world, model)
        peaks = []
        for step in range(5):
            kept = [*model.pieces().values(), images, labels]
            kept += [p.grad for p in model.trainable().values() if p.grad is not None]
            before = meter.lap(live_bytes=tensor_bytes(kept)).live_bytes
            steps.run(step, (batch,))
            peaks.append(meter.lap().peak_bytes - before)
        return statistics.median_low(peaks[1:])  # a thread of gloo may free a buffer unseen


def sent_in_rounds(
    world: World, plan: Plan, net: type[nn.Module], rows: tuple[int, ...]
) -> list[tuple[int, int]]:
    """For each round, the messages and bytes of the gather that this rank receives."""
    model = nets.cut_net(world, plan, net, rows)
    images, labels = nets.batch(net, sum(rows))
    span = Shard(0, rows).span(world.rank)
    batch = MicroBatch(rows, 0, (images.narrow(0, *span),), labels.narrow(0, *span))
    assert plan.tail is not None
    steps, parted = stepper(world, model), Counting(model, plan.tail)
    steps.passes.parted = parted
    steps.run(0, (batch,))
    return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise([(0, 0), *parted.seen])]


class Counting(PartedModel):
    """Notes what has been received after each start of a round's gather."""

    def __init__(self, model: CutModel, tail: Tail) -> None:
        super().__init__(model, tail)
        self.seen: list[tuple[int, int]] = []

    def start(self, part: Tensor, brought: TailRound) -> None:
        super().start(part, brought)
        recorder = self.model.shard_group(self.tail.group_size).recorder
        found = [r for r in recorder.rows() if (r.layer, r.phase) == ("tail.0", "forward")]
        assert [r.op for r in found] == ["all_gather"]
        self.seen.append((found[0].messages, found[0].bytes))
