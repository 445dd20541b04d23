"""A small data set as a user writes one: points on spirals, with structured targets."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

CLASSES = 3


class Spirals(Dataset):
    """Noisy points, drawn anew whenever they are read."""

    def __init__(self, length: int, seed: int, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.kinds = torch.arange(length) % CLASSES
        radius = torch.rand(length, generator=generator, dtype=torch.float64)
        angle = 4 * radius + 2.1 * self.kinds
        self.points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        point = self.points[index]
        if self.noise:
            point = point + self.noise * torch.randn(2)
        return {"point": point, "kind": self.kinds[index], "weight": torch.tensor(1.0 + index % 2)}


def paired(samples: list[dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Points, and the rest of the samples as targets."""
    every = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    return every.pop("point"), every


def focal(outputs: Tensor, targets: dict[str, Tensor], gamma: float = 2.0) -> Tensor:
    """A loss for each row, weighted."""
    picked = F.log_softmax(outputs, 1).gather(1, targets["kind"][:, None])[:, 0]
    return -((1 - picked.exp()) ** gamma) * picked * targets["weight"]


def counts(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """Hits, claims and members of class 0."""
    claimed, there = outputs.argmax(1) == 0, targets["kind"] == 0
    return torch.stack([(claimed & there).sum(), claimed.sum(), there.sum()])


def f1(sums: Tensor) -> Tensor:
    """The F1 score of these counts."""
    return 2 * sums[0] / (sums[1] + sums[2])
