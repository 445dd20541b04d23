"""Modules, losses and data sets that look suspicious and are innocent: none of them is refused."""

import copy
import functools
import itertools
import logging
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset, default_collate

from workbench.client.run.trying import try_out
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, Loss, TorchData
from workbench.plan.plans.plan import Plan

LOG = logging.getLogger(__name__)
WIDTH = 6


class Net(nn.Module):
    """A body and a head; what a subclass makes of `forward` comes between."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.made()

    def made(self):
        pass

    def between(self, x):
        return x

    def forward(self, x):
        return self.head(self.between(self.body(x)))


class FrozenTeacher(Net):
    """Reads a copy of its body, which nobody moves."""

    def made(self):
        self.teacher = copy.deepcopy(self.body).requires_grad_(False)

    def between(self, x):
        return x + self.teacher(x).detach()


class ClampedCopy(Net):
    def between(self, x):
        return F.linear(x, self.body.weight.clamp(-0.2, 0.2))


class WeightStandardized(Net):
    def between(self, x):
        w = self.body.weight
        return F.linear(x, (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-5))


class WeightNormed(Net):
    def made(self):
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def between(self, x):
        return self.normed(x)


class Orthogonal(Net):
    def made(self):
        self.turned = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH, bias=False))

    def between(self, x):
        return self.turned(x)


class SpectralInEval(Net):
    def made(self):
        self.normed = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)).eval()

    def between(self, x):
        return self.normed(x)


class LowRank(Net):
    def made(self):
        self.a, self.b = nn.Parameter(torch.rand(WIDTH, 2)), nn.Parameter(torch.rand(2, WIDTH))

    def between(self, x):
        return x + x @ self.a @ self.b


class Tied(Net):
    def made(self):
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.body.weight

    def between(self, x):
        return self.again(x)


class Remembering(Net):
    """Leaves an activation for others to look at."""

    def between(self, x):
        self.last = x
        return x


class Collecting(Net):
    def made(self):
        self.seen = []

    def between(self, x):
        self.seen.append(x)
        return x


class NotingShapes(Net):
    def between(self, x):
        self.shape = x.shape[1:]
        return x


class MaskOnce(Net):
    """Makes a number once, and uses it from then on."""

    def made(self):
        self.scale = None

    def between(self, x):
        if self.scale is None:
            self.scale = 1 / math.sqrt(x.shape[1])
        return x * self.scale


@functools.lru_cache
def slopes(count):
    return tuple(2.0**-n for n in range(count))


class CachedSlopes(Net):
    def between(self, x):
        return x * torch.tensor(slopes(WIDTH), dtype=x.dtype)


class Logging(Net):
    def between(self, x):
        LOG.debug("%s", x.shape)
        return x


class Printing(Net):
    def between(self, x):
        print("between", end="")
        return x


class Hooked(Net):
    """A hook doubles what the body gives."""

    def made(self):
        self.body.register_forward_hook(lambda module, args, out: 2 * out)


class Checkpointed(Net):
    def between(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


class BatchNormed(Net):
    def made(self):
        self.norm = nn.BatchNorm1d(WIDTH)

    def between(self, x):
        return self.norm(x)


class Scratch(Net):
    """Writes into memory of its own."""

    def between(self, x):
        y = torch.zeros_like(x)
        y.copy_(x)
        y += 1
        return y


class WorkingOnCopies(Net):
    def between(self, x):
        with torch.no_grad():
            copies = [p.clone().clamp_(-1, 1) for p in self.parameters()]
            torch._foreach_mul_(copies, 0.5)
        return x


class BySettings(Net):
    def made(self):
        self.config = {"kind": "tanh", "depth": 2, "names": ["a", "b"]}

    def between(self, x):
        for _ in range(self.config["depth"]):
            x = torch.tanh(x) if self.config["kind"] == "tanh" else x
        return x


class FreshIterator(Net):
    def between(self, x):
        numbers = itertools.count(1)
        return x * next(numbers) + next(numbers)


class Dropping(Net):
    def between(self, x):
        return F.dropout(x, 0.3, self.training) + 0.1 * torch.randn_like(x) * self.training


class Annotated(Net):
    """Returns a dataclass."""

    @dataclass
    class Out:
        scores: torch.Tensor
        hidden: torch.Tensor

    def forward(self, x):
        hidden = self.body(x)
        return self.Out(self.head(hidden), hidden)


class Frozen(Net):
    def made(self):
        self.body.requires_grad_(False)


class WithModuleList(Net):
    def made(self):
        self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def between(self, x):
        for part in self.parts:
            x = x + part(x).relu()
        return x


class OwnGradient(Net):
    """A straight-through estimator without a class."""

    def between(self, x):
        return x + (x.sign() - x).detach()


MODULES = [
    FrozenTeacher, ClampedCopy, WeightStandardized, WeightNormed, Orthogonal, SpectralInEval,
    LowRank, Tied, Remembering, Collecting, NotingShapes, MaskOnce, CachedSlopes, Logging, Printing,
    Hooked, Checkpointed, BatchNormed, Scratch, WorkingOnCopies, BySettings,
    FreshIterator, Dropping, Annotated, Frozen, WithModuleList, OwnGradient,
]  # fmt: skip


@pytest.mark.parametrize("kind", MODULES)
def test_a_module_is_traced(kind):
    outputs = {"scores": "prediction"} if kind is Annotated else None
    assert trace(kind(), input_shape=(WIDTH,), outputs=outputs).num_classes == 3


GRAPH = trace(nn.Linear(WIDTH, 3), input_shape=(WIDTH,))
X, Y = torch.randn(48, WIDTH), torch.arange(48) % 3
LABELLED = TensorDataset(X, Y)


def experiment(data=LABELLED, **fields):
    plan = Plan.data_parallel(GRAPH, 2)
    return Experiment(plan=plan, data=data, optimizer=SGD(0.1), steps=3, batch_size=8, **fields)


def rows(out, y, **options):
    return F.cross_entropy(out, y, reduction="none", **options)


def of_one_hot(out, y):
    return F.one_hot(y, 3).to(out)


WEIGHT = torch.tensor([1.0, 2.0, 0.5])
TEACHER = nn.Linear(3, 3).requires_grad_(False)
MASKS = {}


class Focal(nn.Module):
    def __init__(self, gamma=2.0):
        super().__init__()
        self.gamma = gamma
        self.register_buffer("weight", WEIGHT.clone())

    def forward(self, out, y):
        plain = rows(out, y, weight=self.weight)
        return (1 - (-plain).exp()) ** self.gamma * plain


def masked(out, y):
    mask = MASKS.setdefault(len(out), torch.ones(len(out)))
    return rows(out, y) * mask


def printed(out, y):
    LOG.info("loss of %d rows", len(out))
    return rows(out, y)


LOSSES = {
    "cross entropy": nn.CrossEntropyLoss(),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "focal": Focal(),
    "squares": lambda out, y: (out - of_one_hot(out, y)).square().mean(),
    "huber": lambda out, y: F.huber_loss(out, of_one_hot(out, y)),
    "logits": lambda out, y: F.binary_cross_entropy_with_logits(out, of_one_hot(out, y)),
    "probabilities": lambda out, y: F.nll_loss(out.clamp_min(1e-6).log(), y),
    "margins": nn.MultiMarginLoss(),
    "summed": Loss(nn.CrossEntropyLoss(reduction="sum"), reduction="sum"),
    "weighed": Loss(nn.CrossEntropyLoss(reduction="none"), weights=lambda y: WEIGHT[y]),
    "distilled": lambda out, y: rows(out, y) + (out - TEACHER(out)).square().mean(1),
    "entropy": lambda out, y: rows(out, y) - 0.1 * (out.softmax(1) * out.log_softmax(1)).sum(1),
    "clipped": lambda out, y: rows(out, y).clamp(max=3.0),
    "thresholded": lambda out, y: rows(out, y) * (rows(out, y) > 0.7),
    "tempered": lambda out, y: rows(out / 4, y),
    "cosine": lambda out, y: 1 - F.cosine_similarity(out, of_one_hot(out, y)),
    "masked": masked,
    "printed": printed,
    "partial": functools.partial(rows, label_smoothing=0.2),
    "exponential": lambda out, y: (-out.gather(1, y[:, None])[:, 0]).exp(),
    "in place": lambda out, y: rows(out.mul_(2.0), y),
    "a norm": lambda out, y: (out - of_one_hot(out, y)).norm(dim=1),
}


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_taken(name, precision):
    if precision == "fp64" and name in ("focal", "weighed", "distilled"):
        precision = "fp32"  # which have numbers of their own in that
    assert try_out(experiment(loss=LOSSES[name], precision=precision)) is not None


class Augmented(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn_like(x) * float(np.random.rand()), y


class Caching(TensorDataset):
    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.cache = {}

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]


class Opened(TensorDataset):
    file = None

    def __getitem__(self, index):
        if self.file is None:
            self.file = open(__file__)
        return super().__getitem__(index)

    def __del__(self):
        if self.file is not None:
            self.file.close()


class Weighted(TensorDataset):
    """Draws its samples by weights, as a sampler would."""

    def __getitem__(self, index):
        return super().__getitem__(torch.multinomial(torch.rand(48), 1).item())


class Mixup(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        other = int(torch.randint(len(self), ()))
        return 0.8 * x + 0.2 * self.tensors[0][other], y


class ByEpoch(TensorDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + self.epoch, y


class Stream(IterableDataset):
    def __init__(self, length=48):
        self.length = length

    def __iter__(self):
        return ((X[index], Y[index]) for index in range(self.length))


class Noise(Stream):
    def __iter__(self):
        return ((X[index] + torch.rand(()), Y[index]) for index in range(self.length))


def standardized(samples):
    x, y = default_collate(samples)
    return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), y


def in_place(samples):
    x, y = default_collate(samples)
    x[x > 2] = 2.0
    return x, y.long()


DATA = {
    "tensors": LABELLED,
    "a list": list(LABELLED),
    "a subset": Subset(LABELLED, range(10, 40)),
    "two": ConcatDataset([LABELLED, LABELLED]),
    "augmented": Augmented(X, Y),
    "a cache": Caching(X, Y),
    "an open file": Opened(X, Y),
    "weighted sampling": Weighted(X, Y),
    "mixup": Mixup(X, Y),
    "epochs": ByEpoch(X, Y),
    "a stream": TorchData(train=Stream(), samples=48),
    "a stream with noise": TorchData(train=Noise(), samples=48),
    "each row by itself": TorchData(train=LABELLED, collate=standardized),
    "written in place": TorchData(train=LABELLED, collate=in_place),
    "mappings": TorchData(train=[{"x": x, "y": y} for x, y in LABELLED], inputs="x", targets="y"),
    "two splits": (LABELLED, Subset(LABELLED, range(12))),
}


@pytest.mark.parametrize("name", DATA)
def test_data_is_taken(name):
    try_out(experiment(DATA[name]))


def test_they_are_many():
    assert len(MODULES) + len(LOSSES) + len(DATA) >= 60
