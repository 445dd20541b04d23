"""Losses that look innocent on one batch are found where they are not, and by what they read."""

import itertools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment
from workbench.plan.experiment.task import Loss
from workbench.plan.extension.user_object import OwnObjectError
from workbench.plan.graph.graph import Input
from workbench.plan.plans.plan import Plan
from workbench.train.data.copied import held_by
from workbench.train.data.datasets import open_data
from workbench.train.step.loss import OwnLoss
from workbench.train.step.trial import LossTrial, Trial

torch.manual_seed(0)
MODEL = nn.Linear(2, 3)
GRAPH = trace(MODEL, input_shape=(2,))
CPU = torch.device("cpu")
LABELLED = TensorDataset(torch.rand(64, 2), torch.arange(64) % 3)
NUMBERS = TensorDataset(torch.rand(64, 2), torch.randn(64, 3))


def check(loss, data=LABELLED, dtype=torch.float32, held=(), batch_size=4):
    plan = Plan.data_parallel(GRAPH, 1)
    run = Experiment(
        plan=plan, data=data, loss=loss, optimizer=SGD(0.1), steps=1, batch_size=batch_size
    )
    opened = open_data(run.data, (Input((2,)),), 3, "train")
    own = OwnLoss(run.loss, None, CPU, dtype)
    trial = LossTrial(own, dict(held))
    trial.check(Trial.of(GRAPH, opened, CPU, dtype, batch_size), batch_size)
    own.look = trial.look
    return own


def rows(out, y):
    return F.cross_entropy(out, y, reduction="none")


def hard(out, y):
    each = rows(out, y)
    return each[each > 0.7].mean()


def confident(out, y):
    each, sure = rows(out, y), out.softmax(1).amax(1)
    return each[sure < 0.95].mean()


def largest(out, y):
    each = rows(out, y)
    return each.topk(len(each) // 2).values.mean()


def flooded(out, y, level=1.2):
    return (rows(out, y).mean() - level).abs() + level


def flooded_high(out, y):
    return flooded(out, y, 9.0)


def clipped_mean(out, y):
    return rows(out, y).mean().clamp_max(6.0)


def normalised_where_large(out, y):
    scale = out.abs().amax()
    return rows(out if scale < 5 else 5 * out / scale.detach(), y)


def balanced_when_learned(out, y):
    each, right = rows(out, y), out.argmax(1) == y
    share = right.double().mean().item()
    return each.mean() if share < 0.9 else (each * right).sum() / right.sum()


def huber_of_batch(out, y):
    return F.smooth_l1_loss((out - y).square().mean().sqrt(), torch.zeros(()).to(out), beta=2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "loss",
    [
        hard,
        confident,
        largest,
        flooded,
        flooded_high,
        clipped_mean,
        normalised_where_large,
        balanced_when_learned,
    ],
)
def test_a_loss_that_mixes_rows_somewhere_is_refused(loss, dtype):
    with pytest.raises(OwnObjectError, match="the loss of a row must not depend on others"):
        check(loss, dtype=dtype)


def test_a_loss_of_numbers_that_mixes_rows_near_the_targets_is_refused():
    with pytest.raises(OwnObjectError, match="the loss of a row must not depend on others"):
        check(huber_of_batch, NUMBERS)


TAKEN = {
    "focal": lambda out, y: (1 - (-rows(out, y)).exp()) ** 2 * rows(out, y),
    "rows with a threshold": lambda out, y: rows(out, y) * (rows(out, y) > 0.7),
    "clipped rows": lambda out, y: rows(out, y).clamp_max(2.0),
    "flooded rows": lambda out, y: (rows(out, y) - 1.2).abs() + 1.2,
    "of probabilities": lambda out, y: F.nll_loss(out.log(), y),
    "binary, of probabilities": lambda out, y: F.binary_cross_entropy(out, F.one_hot(y, 3).to(out)),
    "with logits": lambda out, y: F.binary_cross_entropy_with_logits(out, F.one_hot(y, 3).to(out)),
    "a margin": nn.MultiMarginLoss(),
    "a sum": Loss(nn.CrossEntropyLoss(reduction="sum"), reduction="sum"),
    "a distillation": lambda out, y: F.kl_div(
        out.log_softmax(1), F.one_hot(y, 3).to(out).mul(4).softmax(1), reduction="batchmean"
    ),
    "an exponential": lambda out, y: (-out.gather(1, y[:, None])[:, 0]).exp(),
    "arc cosines": lambda out, y: rows(30 * F.normalize(out, dim=1).clamp(-0.99, 0.99).arccos(), y),
    "a large constant": lambda out, y: rows(out, y) + 1e6,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", TAKEN.values(), ids=TAKEN)
def test_a_loss_over_rows_is_taken_wherever_it_is_tried(loss, dtype):
    check(loss, dtype=dtype)


@pytest.mark.parametrize(
    "loss",
    [
        nn.MSELoss(),
        nn.HuberLoss(delta=0.1),
        lambda out, y: (out - y).abs().mean(1),
        lambda out, y: F.gaussian_nll_loss(out, y, out.exp()),
        lambda out, y: 1 - F.cosine_similarity(out, y),
        lambda out, y: F.poisson_nll_loss(out, y.abs()),
        lambda out, y: (out - y).square().sum(1).sqrt(),
        lambda out, y: torch.logcosh(out - y) if hasattr(torch, "logcosh") else (out - y).square(),
    ],
)
def test_a_loss_of_numbers_is_taken_wherever_it_is_tried(loss):
    def of_rows(out, y):
        found = loss(out, y)
        return found.mean(1) if found.ndim > 1 else found

    check(of_rows, NUMBERS)


CENTRES = nn.Parameter(torch.zeros(3))
SCALE = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: rows(out, y).mean() + 0.05 * sum(p.abs().sum() for p in MODEL.parameters()),
        lambda out, y: rows(out - CENTRES, y),
        lambda out, y: rows(SCALE * out, y),
        lambda out, y: rows(out, y) + (SCALE.square() if out.abs().max() > 8 else 0.0),
    ],
)
def test_a_loss_that_trains_something_of_its_own_is_refused(loss):
    text = "requires a gradient and is no output of the model.*auxiliary output"
    with pytest.raises(OwnObjectError, match=text):
        check(loss)


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: rows(out, y) * MODEL.weight.detach().norm(),
        lambda out, y: rows(out / (1 + MODEL.bias.data.abs().mean()), y),
        lambda out, y: rows(out, y) + 0.1 * MODEL.weight.square().sum().item(),
        torch.no_grad()(lambda out, y: rows(out, y) + MODEL(torch.ones(1, 2)).sum()),
    ],
)
def test_a_loss_that_reads_the_model_is_refused(loss):
    with pytest.raises(OwnObjectError, match=r"reads '\w+' of the model itself.*auxiliary"):
        check(loss, held=held_by(MODEL))


def test_a_loss_may_be_a_method_of_the_model():
    class Own(nn.Linear):
        def loss(self, out, y):
            return rows(out, y)

    model = Own(2, 3)
    check(model.loss, held=held_by(model))


class ReadsElsewhere(nn.Module):
    """Holds a model, though not as a part."""

    def __init__(self):
        super().__init__()
        self.held = [MODEL]

    def forward(self, out, y):
        with torch.no_grad():
            return rows(out, y) * self.held[0].bias.abs().sum()


def test_nor_may_a_loss_that_holds_the_model_as_no_part():
    with pytest.raises(OwnObjectError, match="reads 'bias' of the model itself"):
        check(ReadsElsewhere(), held=held_by(MODEL))


def hardest(out, y):
    each = rows(out, y)
    return each * (each >= each.topk(min(len(each), 100)).values[-1])


def test_a_loss_is_tried_with_as_many_rows_as_a_batch_has():
    data = TensorDataset(torch.rand(300, 2), torch.arange(300) % 3)
    check(hardest, data)
    with pytest.raises(OwnObjectError, match="hardest of 256 rows"):
        check(hardest, data, batch_size=256)


class Prototypes:
    """Remembers the first row of each class."""

    def __init__(self):
        self.first = {}

    def __call__(self, out, y):
        for row, label in zip(out.detach(), y.tolist(), strict=True):
            self.first.setdefault(label, row)
        return rows(out - torch.stack([self.first[label] for label in y.tolist()]), y)


class Largest:
    """Remembers the largest output."""

    def __init__(self):
        self.largest = 1.0

    def __call__(self, out, y):
        self.largest = max(self.largest, out.abs().max().item())
        return rows(out / self.largest, y)


class OfTheFirst:
    """Remembers its first value."""

    first = None

    def __call__(self, out, y):
        each = rows(out, y)
        self.first = self.first or each.mean().item()
        return each / self.first


class OfWholeBatches:
    """Remembers a mean over batches, but not over what is left of an epoch."""

    mean = 0.0

    def __call__(self, out, y):
        each = rows(out - self.mean, y)
        if len(out) == 20:
            self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        return each


@pytest.mark.parametrize("loss", [Prototypes, Largest, OfTheFirst, OfWholeBatches])
def test_a_loss_that_depends_on_what_it_met_is_refused(loss):
    given = loss()
    with pytest.raises(OwnObjectError, match=r"must not depend on others|keeps state"):
        check(given, batch_size=20)
    assert vars(given) == vars(loss()), "a trial has left something in the user's object"


def test_targets_that_were_not_tried_are_looked_at():
    own, y = check(F.cross_entropy, batch_size=12), torch.arange(12) % 3
    outputs = (torch.rand(12, 3),)
    for _ in range(20):
        own.look(GRAPH, outputs, y, 12)
    y[11] = -100
    with pytest.raises(OwnObjectError, match="cross_entropy of 12 rows"):
        own.look(GRAPH, outputs, y, 12)


def counting():
    calls = 0

    def annealed(out, y):
        nonlocal calls
        calls += 1
        return rows(out, y) * (1.0 if calls < 1000 else 0.5)

    return annealed


class Moving:
    """Remembers a mean over its calls."""

    def __init__(self):
        self.mean = torch.zeros(3)

    def __call__(self, out, y):
        self.mean = 0.9 * self.mean + 0.1 * out.detach().float().mean(0)
        return rows(out, y)


class Iterated(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = itertools.count()

    def forward(self, out, y):
        next(self.steps)
        return rows(out, y)


LOG = []


def logged(out, y):
    LOG.append(float(out.detach().sum()))
    return rows(out, y)


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (counting(), "'calls' in the closure of annealed"),
        (Moving(), "it.mean"),
        (Iterated(), "it.steps"),
        (logged, "the global 'LOG'"),
    ],
)
def test_a_loss_that_keeps_state_is_refused_by_name(loss, what):
    with pytest.raises(OwnObjectError, match=f"keeps state: a call changes {what}"):
        check(loss)


def test_a_loss_may_keep_what_it_makes_once():
    kept = {}

    def with_a_mask(out, y):
        mask = kept.setdefault(len(out), torch.ones(len(out)))
        return rows(out, y) * mask

    check(with_a_mask)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (lambda out, y: rows(out + 0.1 * torch.randn_like(out), y), "torch"),
        (lambda out, y: rows(out, y) * random.random(), "random"),
        (lambda out, y: rows(out * np.random.rand(), y), r"numpy\.random"),
        (lambda out, y: rows(F.dropout(out), y), "torch"),
    ],
)
def test_a_loss_that_draws_is_refused(loss, name):
    with pytest.raises(OwnObjectError, match=rf"draws random numbers \({name}\)"):
        check(loss)


def test_a_loss_with_a_generator_of_its_own_is_refused():
    generator = np.random.default_rng(0)
    with pytest.raises(OwnObjectError, match="keeps state"):
        check(lambda out, y: rows(out, y) * generator.random())


def test_a_loss_that_communicates_is_refused():
    def together(out, y):
        found = rows(out, y).mean()
        torch.distributed.all_reduce(found)
        return found

    with pytest.raises(OwnObjectError, match="A loss must not communicate"):
        check(together)


def test_the_range_that_was_tried_is_told():
    seen = check(F.cross_entropy).seen
    assert seen.outputs[0] < -10 < 10 < seen.outputs[1]
    assert seen.losses[0] < 0.01 < 10 < seen.losses[1]
    assert str(seen).startswith("outputs from -")
