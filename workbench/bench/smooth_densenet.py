"""DenseNet-121 without kinks: what rounding does to its gradients then is small."""

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from workbench.model.vision import torchvision


class SmoothDenseNet(nn.Module):
    """DenseNet-121 with SiLU in the place of every ReLU.

    A ReLU whose input rounds to the other side of zero passes a gradient on or does not, however
    little the input changed; one such image of few is a large part of a gradient. With SiLU,
    gradients are continuous, and the same layers, cuts and sums can be held to a tight tolerance.

    Args:
        num_classes: that it tells apart.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        dense = torchvision().models.densenet121(num_classes=num_classes)
        self.features, self.classifier, self.last = dense.features, dense.classifier, nn.SiLU()
        for path, module in list(self.features.named_modules()):
            if isinstance(module, nn.ReLU):
                self.features.set_submodule(path, nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        """Images [rows, 3, height, width] to scores [rows, classes]."""
        pooled = adaptive_avg_pool2d(self.last(self.features(x)), (1, 1))
        scores: Tensor = self.classifier(torch.flatten(pooled, 1))
        return scores
