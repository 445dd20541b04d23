"""Nets that one core trains to the end in seconds, with more parameters than arithmetic."""

import torch
from torch import nn

DIGITS_SHAPE, COLOUR_SHAPE = (1, 8, 8), (3, 32, 32)


def mlp() -> nn.Sequential:
    """64-512-512-10: 301,066 parameters, for 8 x 8 grey images."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def cnn(classes: int = 10) -> nn.Sequential:
    """Two convolutions and two linear layers, the first 2048-128: for 32 x 32 colour images."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2048, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )
