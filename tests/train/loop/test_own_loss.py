"""A user's own loss and metrics: what mixes rows, or does not add up, is found before step 1."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests.train.data.spirals import Spirals, counts, f1, focal, paired
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment
from workbench.plan.experiment.task import Loss, Metric, TorchData
from workbench.plan.extension.user_object import OwnObjectError
from workbench.plan.graph.graph import Input
from workbench.plan.plans.plan import Plan
from workbench.train.data.datasets import open_data
from workbench.train.run.scoring import Scoring
from workbench.train.step.loss import OwnLoss
from workbench.train.step.trial import LossTrial, Trial

GRAPH = trace(nn.Linear(2, 3), input_shape=(2,))
CPU = torch.device("cpu")
LABELLED = TensorDataset(torch.rand(30, 2), torch.arange(30) % 3)
WEIGHTS = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)


def experiment(data, **fields):
    plan = Plan.data_parallel(GRAPH, 1)
    return Experiment(plan=plan, data=data, optimizer=SGD(0.1), steps=1, batch_size=4, **fields)


def tried(data):
    run = experiment(data)
    return Trial.of(GRAPH, open_data(run.data, (Input((2,)),), 3, "train"), CPU, torch.float64)


def check(loss, data=LABELLED):
    run = experiment(data, loss=loss)
    LossTrial(OwnLoss(run.loss, None, CPU, torch.float64)).check(tried(data))


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(reduction="none", weight=WEIGHTS.float()),
        Loss(nn.CrossEntropyLoss(reduction="sum", weight=WEIGHTS), reduction="sum"),
        Loss(lambda out, y: F.nll_loss(out.log(), y)),
        Loss(nn.CrossEntropyLoss(reduction="none"), weights=lambda y: WEIGHTS[y]),
        lambda out, y: (out - F.one_hot(y, 3)).square().mean(),
        lambda out, y: F.binary_cross_entropy(out, F.one_hot(y, 3).double()),
    ],
)
def test_a_loss_over_rows_is_taken(loss):
    check(loss)


def centred(x):
    """Zero, with the gradient of x."""
    return x - x.detach()


def test_a_loss_may_write_into_what_it_gets():
    check(lambda out, y: F.nll_loss(out.log_(), y))


def test_a_gradient_may_be_no_number_where_a_root_is_zero():
    check(lambda out, y: (out * 0).norm(dim=1) + (out[:, 0] - 0.5).abs())


def test_a_loss_may_be_constant_for_rows_that_it_leaves_out():
    """Of LABELLED every third row has the label 0, so that no two neighbours are left out."""

    def of_some(out, y):
        there = y > 0
        if not there.any():
            return torch.zeros(())
        return F.cross_entropy(out[there], y[there], reduction="sum")

    check(Loss(of_some, reduction="sum"))
    check(Loss(of_some, reduction="sum"), TensorDataset(torch.rand(30, 2), torch.arange(30) // 10))


def test_a_loss_of_one_sample_is_taken():
    check(F.cross_entropy, TensorDataset(torch.rand(1, 2), torch.zeros(1).long()))


def test_structured_targets_are_taken():
    check(focal, TorchData(train=Spirals(40, 0), collate=paired))


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (
            nn.CrossEntropyLoss(weight=WEIGHTS),
            r"must not depend on others.*CrossEntropy\(ignore_index=..., weight",
        ),
        (nn.CrossEntropyLoss(ignore_index=0), "must not depend on others"),
        (lambda out, y: (out - out.mean(0)).square().mean(), "must not depend on others"),
        (nn.CrossEntropyLoss(reduction="sum"), r"Loss\(..., reduction='sum'\)"),
        (Loss(F.cross_entropy, reduction="sum"), r"Loss\(..., reduction='mean'\)"),
        (lambda out, y: out @ out, r"fails for outputs of shape \(30, 3\).*RuntimeError"),
        (lambda out, y: out, r"shape \(30,\) for 30 rows, got \(30, 3\)"),
        (lambda out, y: 1.0, "got float"),
        (Loss(F.cross_entropy, weights=lambda y: y * 0 + 2.0), r"with weights one number for each"),
        (
            Loss(nn.CrossEntropyLoss(reduction="none"), weights=lambda y: WEIGHTS),
            r"weights of loss .* \(30,\) for 30 rows, got \(3,\)",
        ),
        ("torch.nn:CrossEntropyLoss", "is a class: give an object"),
        (lambda out, y: out.sum() * math.nan, r"is nan for outputs of shape \(30, 3\)"),
        (
            lambda out, y: (out.argmax(1) != y).double(),
            r"has no gradient for outputs of shape \(30, 3\).* argmax, .*metrics=",
        ),
        (lambda out, y: F.cross_entropy(out.detach(), y), "has no gradient"),
        (lambda out, y: torch.tensor(F.cross_entropy(out, y).item()), "has no gradient"),
        (lambda out, y: WEIGHTS.clone().requires_grad_().sum(), "requires a gradient and is no"),
        (
            lambda out, y: F.cross_entropy(out, y) + centred(out.square().sum() / len(y) ** 2),
            "of 30 rows has another gradient than by halves: the loss of a row must not depend",
        ),
        (
            lambda out, y: centred(out.square().sum()),
            r"another gradient than by halves: .* reduction='sum'\)",
        ),
        (nn.AdaptiveLogSoftmaxWithLoss(8, 3, [1]), "has parameters of its own"),
    ],
)
def test_what_is_no_loss_over_rows_is_refused(loss, text):
    with pytest.raises(OwnObjectError, match=text):
        check(loss)


def test_a_mean_over_unequal_numbers_of_tokens_is_refused():
    """Of many rows all have nearly as many, so that two rows tell what halves do not."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(64, 16, 256, generator=generator)
    tokens = torch.randint(256, (64, 16), generator=generator)

    def over_some(scores, tokens):
        each = F.cross_entropy(scores.flatten(0, 1), tokens.flatten(), reduction="none")
        return (each * (tokens.flatten() > 64)).sum() / (tokens > 64).sum()

    value = experiment(LABELLED, loss=over_some).loss
    loss = OwnLoss(value, None, CPU, torch.float32)
    with pytest.raises(OwnObjectError, match=r"of 2 rows is .* by halves: the loss of a row must"):
        LossTrial(loss).check(Trial(GRAPH, 64, (scores,), tokens))


def test_outputs_and_targets_that_are_broadcast_are_named():
    one = Trial(GRAPH, 8, (torch.rand(8, 1),), torch.rand(8))
    value = experiment(LABELLED, loss=lambda y, t: (y - t).square().mean()).loss
    text = r"outputs are \(8, 1\) and targets \(8,\), which torch broadcasts to \(8, 8\): give both"
    with pytest.raises(OwnObjectError, match=text):
        LossTrial(OwnLoss(value, None, CPU, torch.float32)).check(one)


class Hits:
    """As torchmetrics has them: states that add up."""

    def __init__(self, reduction="dim_zero_sum"):
        def dim_zero_sum(x):
            return x.sum(0)

        dim_zero_sum.__name__ = reduction
        self._reductions = {"hits": dim_zero_sum, "rows": dim_zero_sum}
        self.reset()

    def reset(self):
        self.hits, self.rows = torch.tensor(0), torch.tensor(0)

    def update(self, outputs, targets):
        self.hits += (outputs.argmax(1) == targets).sum()
        self.rows += len(targets)

    def compute(self):
        return self.hits / self.rows


def scoring(metrics, loss=F.cross_entropy, data=LABELLED, notes=None):
    both = data if isinstance(data, TorchData) else (data, data)
    run = experiment(both, loss=loss, metrics=metrics)
    own = None if loss is None else OwnLoss(run.loss, None, CPU, torch.float64)
    return Scoring.of(run, own, tried(data), notes)


def test_figures_are_made_of_the_parts_sums():
    data = TorchData(train=Spirals(40, 0), test=Spirals(9, 1), collate=paired)
    metrics = {"f1": Metric(counts, result=f1), "right": lambda out, y: out.argmax(1) == y["kind"]}
    scores, whole = scoring(metrics, focal, data), tried(data)
    sums = sum(scores.sums(p.outputs, p.targets, p.rows) for p in whole.cut(7))
    found = scores.figures(sums, 40)
    given = whole.outputs[0], whole.targets
    assert found["loss"] == pytest.approx(focal(*given).mean().item())
    assert found["f1"] == pytest.approx(f1(counts(*given)).item())
    right = given[0].argmax(1) == given[1]["kind"]
    assert found["right"] == pytest.approx(right.double().mean().item())


def test_states_that_add_up_are_summed():
    scores, whole = scoring({"hits": Hits()}), tried(LABELLED)
    sums = sum(scores.sums(p.outputs, p.targets, p.rows) for p in whole.cut(11))
    right = (whole.outputs[0].argmax(1) == whole.targets).double().mean().item()
    assert scores.figures(sums, 30)["hits"] == pytest.approx(right)


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (lambda out, y: out.mean(), r"shape \(\) for 30 rows; without result="),
        (Metric(lambda out, y: out.mean(), result=float), "are not those of their halves"),
        (Metric(lambda out, y: out[:, 0], result=len), "for 30 rows, and another for half"),
        (Metric(counts, result=f1), "metric 'm' fails for .*IndexError"),
        (lambda out, y: 0.5, "gives float, and a tensor is wanted"),
        (Hits("dim_zero_cat"), "its state 'hits' does not add up over rows"),
    ],
)
def test_what_does_not_add_up_is_refused(metric, text):
    with pytest.raises(OwnObjectError, match=text):
        scoring({"m": metric})


def of_class_7(out, y):
    """How often class 7 is there, and is hit; of LABELLED no label is."""
    return torch.stack([(y == 7).sum(), ((y == 7) & (out.argmax(1) == 7)).sum()])


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (lambda out, y: out[:, 0] / y, r"'m' is inf for outputs of shape \(30, 3\).*result="),
        (lambda out, y: (out[:, 0] - 1).log(), "'m' is nan for .* between 0 and 1"),
        (Metric(lambda out, y: (y / y).sum(), result=lambda n: n / 2), "'m' is nan for"),
    ],
)
def test_sums_that_are_no_numbers_are_refused(metric, text):
    with pytest.raises(OwnObjectError, match=text):
        scoring({"m": metric})


def test_a_result_may_make_numbers_of_sums():
    notes = []
    scoring(
        {"m": Metric(lambda out, y: (y / y).sum(), result=lambda n: n.nan_to_num())}, notes=notes
    )
    assert notes == []


def test_a_result_that_is_no_number_of_these_samples_is_noted():
    notes = []
    scoring({"m": Metric(of_class_7, result=lambda n: n[1] / n[0])}, notes=notes)
    (note,) = notes
    assert note.startswith("metric 'm' is nan for outputs of shape (30, 3) and the targets of 30")


def test_the_loss_keeps_its_name():
    with pytest.raises(OwnObjectError, match="'loss' is the name of the loss"):
        scoring({"loss": lambda out, y: y})
