"""Nets that are trained in part, run on ranks and in a plain loop of torch's."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from tests.layers.nets import piece_of
from workbench.comm.groups.world import World
from workbench.model.weights.slices import WeightsFile
from workbench.plan.experiment.experiment import AdamW, Experiment, Synthetic
from workbench.plan.graph.graph import Input
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.plan import Plan
from workbench.train.data.datasets import open_data
from workbench.train.data.feed import rows_of_step
from workbench.train.run.rank import RankState, group_specs_of
from workbench.train.run.scoring import evaluate
from workbench.train.step.loss import own_rows

SHAPE, CLASSES = (3, 6, 6), 10


class Net(nn.Module):
    """Convolutions with batch norm, a classifier, a layer that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 8, 3, padding=1),
            nn.ReLU(),
            nn.BatchNorm2d(8),
            nn.MaxPool2d(3),
        )
        self.spare = nn.Linear(4, 4)
        self.head = nn.Sequential(
            nn.Linear(32, 12), nn.ReLU(), nn.Linear(12, 11), nn.ReLU(), nn.Linear(11, CLASSES)
        )
        for name, tensor in self.named_parameters():  # nothing is one constant
            if tensor.ndim == 1:
                nn.init.normal_(tensor, mean=float("weight" in name), std=0.3)
        for norm in (self.features[1], self.features[5]):
            nn.init.normal_(norm.running_mean, std=0.3)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.features(x), 1))


class Detached(Net):
    """A branch that is detached, one of which a part is, and a sum of which one term is."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(32, 32)
        self.gate = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(self.features(x), 1)
        fixed = torch.tanh(self.aside(x)).detach()
        x = x + fixed + torch.relu(self.gate(x.detach()))
        return self.head(x * (x > 0))


class Keeps(Net):
    """Keeps its first batch norm in eval mode, however often `train` is called."""

    def train(self, mode: bool = True) -> "Keeps":
        super().train(mode)
        self.features[1].eval()
        return self


def frozen(net: Callable[[], nn.Module] = Net, *names: str, but: str = "") -> nn.Module:
    """A net without gradients for the parameters under these names, or all `but` some."""
    module = net()
    for name, parameter in module.named_parameters():
        off = not name.startswith(but) if but else name.startswith(names)
        parameter.requires_grad_(not off)
    return module


def evaluating(module: nn.Module, *paths: str) -> nn.Module:
    """The net with these parts in eval mode."""
    for path in paths:
        module.get_submodule(path).eval()
    return module


@dataclass
class Found:
    """What one process, or one rank, computes and holds."""

    rows: tuple[int, ...] = ()
    outputs: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    held: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    evaluation: tuple[float, float] = (0.0, 0.0)


def experiment(plan: Plan, **fields: Any) -> Experiment:
    """Three steps with decay, in double precision."""
    given = dict(
        data=Synthetic(samples=27),
        batch_size=12,
        steps=3,
        optimizer=AdamW(lr=0.01, weight_decay=0.1),
        precision="fp64",
    )
    return Experiment(plan=plan.with_batch_norm("synchronized"), **given | fields)


def plain(module: nn.Module, run: Experiment) -> Found:
    """What a loop of torch's own computes."""
    model, found = deepcopy(module).double(), Found()
    kind = run.optimizer.kind
    options = run.optimizer.options
    build = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind]
    optimizer = build(model.parameters(), **options)
    data = open_data(run.data, (Input(SHAPE),), CLASSES, "train")
    for step in range(run.steps):
        images, labels = data.batch(rows_of_step(len(data), run.batch_size, run.seed, step))
        optimizer.zero_grad()
        outputs = model(images.double())
        F.cross_entropy(outputs, labels).backward()
        found.outputs.append(outputs.detach())
        if step == 0:
            found.gradients = {
                name: None if p.grad is None else p.grad.clone()
                for name, p in model.named_parameters()
            }
        optimizer.step()
    found.held = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        found.state |= {f"optimizer/{key}/{name}": x for key, x in state.items() if x is not None}
    test = open_data(run.data, (Input(SHAPE),), CLASSES, "test")
    images, labels = test.batch(torch.arange(len(test)))
    with torch.no_grad():
        logits = model.eval()(images.double())
    right = (logits.argmax(1) == labels).double().mean()
    found.evaluation = F.cross_entropy(logits, labels).item(), right.item()
    return found


def evaluated(state: RankState) -> dict[str, float]:
    """In batches of five."""
    model, data, dtype = state.model, state.test_data, state.stepper.dtype
    return evaluate(model, data, 5, state.everyone, state.world.device, dtype, state.scoring)


def on_a_rank(world: World, run: Experiment, weights: Path) -> Found:
    """What this rank computes of it."""
    groups, found = world.groups(group_specs_of(run.plan)), Found()
    state = RankState.start(run, world, groups, weights, None)
    for step in range(run.steps):
        result = state.stepper.run(step)
        (batch,) = result.batches
        name = run.plan.graph.outputs[0]
        with torch.no_grad():
            found.outputs.append(own_rows(state.model, name, result.outputs[0]).clone())
        if step == 0:
            found.rows = batch.rows
            found.gradients = {
                name: None if piece.grad is None else piece.grad.clone()
                for name, piece in state.model.pieces().items()
                if isinstance(piece, nn.Parameter)
            }
        state.stepper.update()
        evaluated(state)
    state.strategy.settle()
    found.held = {n: t.detach().clone() for n, t in state.model.pieces().items()}
    values = state.updater.values.items()
    every = {f"optimizer/{kind}/{name}" for name, one in values for kind in one.remembers.names}
    found.state = {name: t.clone() for name, t in state.updater.state(every).items()}
    figures = evaluated(state)
    found.evaluation = figures["loss"], figures["accuracy"]
    return found


def check(ranks: list[Found], expected: Found, run: Experiment, *, gradients: bool = True) -> None:
    """Every rank's part is that of the whole; where it has a part of its own state, that is."""
    plan = run.plan
    for rank, found in enumerate(ranks):
        mine = expected.outputs[0].narrow(0, *Shard(0, found.rows).span(rank))
        assert_close(found.outputs[0], mine, rtol=1e-9, atol=1e-11)
        assert found.gradients.keys() == expected.gradients.keys()
        for name, gradient in found.gradients.items():
            whole = expected.gradients[name]
            if whole is None or gradient is None:
                empty = piece_of(plan, name, expected.held[name], rank).numel() == 0
                assert gradient is None, name
                assert whole is None or empty, name
            elif gradients:
                _close(name, gradient, piece_of(plan, name, whole, rank))
        assert found.held.keys() == expected.held.keys()
        for name, tensor in found.held.items():
            _close(name, tensor, piece_of(plan, name, expected.held[name], rank))
        assert found.state.keys() <= expected.state.keys()
        for entry, tensor in found.state.items():
            if not run.shard_optimizer:
                name = entry.split("/", 2)[2]
                whole = expected.state[entry]
                _close(entry, tensor, piece_of(plan, name, whole, rank) if whole.ndim else whole)
        assert_close(found.evaluation, expected.evaluation, rtol=1e-9, atol=1e-11)
    assert {name for found in ranks for name in found.state} == expected.state.keys()


def _close(name: str, found: Tensor, expected: Tensor) -> None:
    assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=lambda text: f"{name}: {text}")


def whole_weights(module: nn.Module, path: Path) -> dict[str, Tensor]:
    """What `initialize` wrote, by name."""
    reader = WeightsFile(path)
    return {name: reader.read(name) for name in module.state_dict()}
