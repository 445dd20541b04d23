"""Tells rings from discs in small, noisy images."""

import argparse
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, Dataset

SIDE, BATCH, MICRO_BATCHES = 16, 48, 2


class Rings(Dataset):
    """Noisy images with a disc (0) or a ring (1); one of four is a ring."""

    def __init__(self, length, first=0, augment=False):
        self.length, self.first, self.augment = length, first, augment

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + index)
        x, y = 5 + 6 * torch.rand(2, generator=generator)
        rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
        distance = ((rows - y) ** 2 + (columns - x) ** 2).sqrt()
        is_ring = index % 4 == 0
        image = ((distance - 3).abs() < 1 if is_ring else distance < 3.2).float()
        image += 0.5 * torch.randn(SIDE, SIDE, generator=generator)
        if self.augment and torch.rand(()) < 0.5:
            image = image.flip(1)
        return image[None], torch.tensor(int(is_ring))


def network():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 2),
    )  # fmt: skip


def focal(outputs, targets, gamma=2.0):
    likely = F.log_softmax(outputs, 1).gather(1, targets[:, None])[:, 0]
    return (-((1 - likely.exp()) ** gamma) * likely).mean()


def counts(outputs, targets):
    """Rings that were found, claimed and there."""
    claimed = outputs.argmax(1)
    return torch.stack([(claimed * targets).sum(), claimed.sum(), targets.sum()])


def f1(sums):
    return 2 * sums[0] / (sums[1] + sums[2])


def main(train, test, epochs, seed=0, precision="bf16"):
    torch.manual_seed(seed)
    net = network()
    matrices = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.05)
    loader = DataLoader(train, BATCH, shuffle=True, num_workers=2)
    warm = LinearLR(optimizer, 1 / 11, total_iters=10)
    cosine = CosineAnnealingLR(optimizer, epochs * len(loader) - 10)
    schedule = SequentialLR(optimizer, [warm, cosine], [10])
    averaged = deepcopy(net)
    for _ in range(epochs):
        for images, labels in loader:
            parts = images.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES)
            for x, y in zip(*parts, strict=True):
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    outputs = net(x)
                loss = focal(outputs, y) * len(x) / len(images)
                loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            for mean, now in zip(averaged.parameters(), net.parameters(), strict=True):
                mean.data.lerp_(now.data, 0.1)
    with torch.no_grad():
        sums = sum(counts(averaged(x), y) for x, y in DataLoader(test, BATCH))
    print(f"F1 of rings: {f1(sums):.3f}")
    return net, averaged


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    main(Rings(960, augment=True), Rings(240, first=960), parser.parse_args().epochs)
