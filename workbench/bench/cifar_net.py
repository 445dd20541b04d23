"""The network of heterogeneous model parallelism for images of 32 x 32."""

import torch
from torch import Tensor, nn

STAGES = ((60, 60), (120, 120), (240, 240), (480, 480))
INPUT_SHAPE = (3, 32, 32)


class CifarNet(nn.Module):
    """Eight convolutions of 3 x 3 without bias, pooled after each pair, then 1920-256-10.

    Args:
        divisor: of all channels; 1: those of the paper, 4.6 M parameters.

    Source: Moreno-Alvarez et al. 2021 (doi:10.1016/j.neucom.2021.01.125), its CIFAR-10 network.
    """

    def __init__(self, divisor: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        channels = 3
        for stage in STAGES:
            for filters in (width // divisor for width in stage):
                layers += [nn.Conv2d(channels, filters, 3, padding=1, bias=False), nn.ReLU()]
                channels = filters
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(4 * channels, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Images [rows, 3, 32, 32] to scores [rows, 10]."""
        return self.classifier(torch.flatten(self.features(x), 1))
