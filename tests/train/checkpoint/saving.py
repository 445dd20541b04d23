"""Trains, saves and resumes a small net on ranks, in steps whose gradients are made up."""

from pathlib import Path

import torch
from torch import Tensor, nn

from workbench.comm.groups.group import Group
from workbench.comm.messages.recorder import Recorder
from workbench.layers.cut import cut
from workbench.layers.cut_model import CutModel, group_specs
from workbench.layers.local.context import BatchContext
from workbench.model.errors import CheckpointError
from workbench.model.tracing.trace import trace
from workbench.model.weights.pieces import Snapshot
from workbench.plan.experiment.experiment import SGD, Experiment, Optimizer
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.plan import Plan
from workbench.train.checkpoint import checkpoint
from workbench.train.checkpoint.saver import Saver, parts
from workbench.train.optimizer.optimizer import Updater

DEVICE = torch.device("cpu")
MOMENTUM = SGD(lr=0.1, momentum=0.9)


def net(width=12):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 16, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def graph(width=12, shape=(3, 4, 4)):
    return trace(net(width), input_shape=shape)


def attending():
    """Tokens of 12 features, and three heads that attend to each other."""
    torch.manual_seed(0)
    return Attending()


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.head = nn.Linear(12, 10)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def piece_under(shard, whole, rank):
    """Rank's part of every block, one behind the other."""
    return torch.cat([whole.narrow(shard.dim, *span) for span in shard.spans(rank)], shard.dim)


class Memory:
    """A reader of weights that stand in memory."""

    def __init__(self, state):
        self.state, self.names = state, tuple(state)

    def shape(self, name):
        return tuple(self.state[name].shape)

    def read(self, name, shard=None, rank=0):
        whole = self.state[name]
        return (whole if shard is None else piece_under(shard, whole, rank)).clone()


class Alone:
    """A world of one rank, in this process."""

    rank, size = 0, 1

    def groups(self, specs):
        return {(purpose, ranks): Group(purpose, ranks, 0, Recorder()) for purpose, ranks in specs}


def experiment(plan: Plan, value: Optimizer) -> Experiment:
    return Experiment(plan=plan, data="digits", optimizer=value, steps=100)


class Part:
    """One rank's part of a run: of new weights, or of a checkpoint."""

    def __init__(
        self, world, plan: Plan, value: Optimizer, resume: Path | None = None, make=net
    ) -> None:
        self.plan, self.value = plan, value
        everyone = ("control", tuple(range(world.size)))
        groups = world.groups([everyone, *group_specs(plan)])
        self.everyone = groups[everyone]
        saved = None if resume is None else checkpoint.load(resume, plan.graph)
        self.done = 0 if saved is None else saved.step
        reader = Memory(make().state_dict()) if saved is None else saved.reader
        context = BatchContext(world.rank, (0,) * world.size, seed=0)
        self.model: CutModel = cut(plan, context, groups, reader, device=DEVICE)
        self.updater = Updater(value, self.model, self.model.trainable())
        if saved is not None:
            checkpoint.restore(saved, self.model, self.updater)

    def train(self, until: int) -> None:
        """Steps with gradients that depend on the weights, so that every bit of them matters."""
        for step in range(self.done, until):
            for name, parameter in self.model.trainable().items():
                placed = self.model.placements[name]
                noise = torch.randn(placed.shape, generator=torch.Generator().manual_seed(step))
                if isinstance(placed.placement, Shard):
                    rank = self.model.context.rank % placed.group_size
                    noise = piece_under(placed.placement, noise, rank)
                parameter.grad = (noise + 0.1 * parameter.detach()).contiguous()
            self.updater.step()
            for name, piece in self.model.pieces().items():
                if name.endswith("running_mean"):
                    piece.add_(1.0)
        self.done = until

    def save(self, directory: Path, *, keep: int = 2) -> Path:
        saver = Saver(directory, self.everyone, keep=keep)
        self.begin(saver)
        saver.finish()
        assert saver.newest is not None
        return saver.newest

    def begin(self, saver: Saver) -> None:
        run = experiment(self.plan, self.value)
        saver.begin(self.done, *parts(self.done, self.model, self.updater), run)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint would hold of this rank."""
        state = self.updater.state(())
        return {name: t.detach().clone() for name, t in (self.model.pieces() | state).items()}


def alone(value: Optimizer = MOMENTUM, until: int = 0, resume: Path | None = None) -> Part:
    """The whole net on one rank in this process, trained until a step."""
    part = Part(Alone(), Plan.data_parallel(graph(), world_size=1), value, resume)
    part.train(until)
    return part


def train_and_save(world, plan, value, until, directory, make=net):
    part = Part(world, plan, value, make=make)
    part.train(until)
    part.save(directory)
    return part.tensors()


def resume_and_train(world, plan, value, path, until):
    part = Part(world, plan, value, path)
    part.train(until)
    return part.tensors()


def save_with_a_full_disk(world, plan, value, directory, full_rank):
    """Rank `full_rank` finds no room for its second checkpoint; -> what each rank is told."""
    part = Part(world, plan, value)
    part.save(directory)
    part.train(1)
    write = Snapshot.write

    def no_room(self, path, *given):
        half = path.with_suffix(".part")  # a name that no rank waits for
        write(self, half, *given)
        half.unlink()
        raise CheckpointError(f"{path.name} could not be written (the disk is full)")

    if world.rank == full_rank:
        Snapshot.write = no_room
    try:
        part.save(directory)
    except CheckpointError as error:
        return str(error)
    finally:
        Snapshot.write = write
    return "saved"
