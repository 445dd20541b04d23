"""A net of every usual layer, small enough for whole runs."""

import torch
from torch import nn

from workbench.model.tracing.trace import trace


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(96, 16),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(16, 12),
        nn.ReLU(),
        nn.Linear(12, 10),
    )


GRAPH = trace(net(), input_shape=(3, 8, 8))
