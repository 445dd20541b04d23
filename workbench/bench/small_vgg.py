"""A VGG for images of 32 x 32 with 7.58 M parameters, two thirds of them in linear layers."""

import torch
from torch import Tensor, nn

STAGES = ((1, 1), (2, 2), (4, 4, 4, 4))  # channels, in widths
INPUT_SHAPE = (3, 32, 32)


class SmallVGG(nn.Module):
    """64-64-M-128-128-M-256x4-M, then 4096-1024-1024-10: 7,580,746 parameters.

    Args:
        width: channels of the first stage; everything else is in proportion.

    Source: a 32 x 32 version of nagadomi's kaggle-cifar10-torch7 net.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        channels = 3
        for stage in STAGES:
            for widths in stage:
                after = widths * width
                layers += [nn.Conv2d(channels, after, 3, padding=1), nn.ReLU(inplace=True)]
                channels = after
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(64 * width, 16 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(16 * width, 16 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(16 * width, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Images [rows, 3, 32, 32] to scores [rows, 10]."""
        return self.classifier(torch.flatten(self.features(x), 1))
