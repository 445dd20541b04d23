"""Tells rings from discs in small, noisy images."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import workbench as wb

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
    graph = wb.trace(network(), input_shape=(1, SIDE, SIDE))
    others = wb.ParameterGroup(dims=1, weight_decay=0.0)
    experiment = wb.Experiment(
        plan=wb.Plan.hybrid(graph, world_size=4, group_size=2),
        data=wb.TorchData(train=train, test=test, workers=2),
        loss=focal,
        metrics={"f1": wb.Metric(counts, result=f1)},
        optimizer=wb.AdamW(3e-3, weight_decay=0.05, groups=[others]),
        schedule=wb.WarmupCosine(warmup=10),
        clip_norm=1.0,
        ema=0.9,
        batch_size=BATCH,
        accumulate=MICRO_BATCHES,
        epochs=epochs,
        precision=precision,
        seed=seed,
    )
    with wb.Cluster(4) as cluster:
        run = cluster.train(experiment).wait()
    print(f"F1 of rings: {run.evaluation['f1']:.3f}")
    return experiment, run


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    main(Rings(960, augment=True), Rings(240, first=960), parser.parse_args().epochs)
