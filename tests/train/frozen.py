"""Nets that are trained in part."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from workbench.plan.experiment.experiment import AdamW, Experiment, Synthetic
from workbench.plan.plans.plan import Plan

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


def experiment(plan: Plan, **fields: Any) -> Experiment:
    """Three steps with decay, in double precision; the third batch is a short one."""
    given = dict(
        data=Synthetic(samples=27),
        batch_size=12,
        steps=3,
        optimizer=AdamW(lr=0.01, weight_decay=0.1),
        precision="fp64",
    )
    return Experiment(plan=plan.with_batch_norm("synchronized"), **given | fields)
