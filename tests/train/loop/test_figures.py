"""Losses and figures of whole outputs, made of sums that are added up by hand."""

import math
from dataclasses import replace

import pytest
import torch

from tests.plan.graphs import Builder, mlp
from workbench.comm.groups.group import Group
from workbench.comm.messages.recorder import Recorder
from workbench.layers.local.loss import PLAIN
from workbench.plan.experiment.task import CrossEntropy, Loss, Metric
from workbench.plan.graph.graph import Input
from workbench.train.data.feed import MicroBatch
from workbench.train.run.scoring import (
    MeanCrossEntropy,
    OwnLossScore,
    Scoring,
    ScoringOfClasses,
    own_score,
    perplexity,
)
from workbench.train.step.loss import OwnLoss

GRAPH = mlp(4, 3)
TOKENS = replace(Builder((5, 4)).linear("head", 3).graph(), inputs=(Input((5, 4), vocabulary=3),))
ALONE = Group("everyone", (0,), 0, Recorder())
CPU = torch.device("cpu")
EVEN = math.log(3)  # the cross-entropy of three classes with the same score


def own(function, **fields):
    return OwnLoss(Loss(function, **fields), ALONE, CPU, torch.float64)


def squares(outputs, targets):
    """A number for each row."""
    return (outputs[:, 0] - targets).square()


OUTPUTS = (torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64),)
TARGETS = torch.tensor([0.0, 4.0, 4.0], dtype=torch.float64)


def test_a_loss_is_summed_over_rows():
    assert own(squares).summed(OUTPUTS[0], TARGETS, 3).item() == 1 + 4 + 1


def test_a_mean_counts_once_for_each_row_and_a_sum_once():
    def number(outputs, targets):
        return outputs.new_tensor(2.0)

    assert own(number).summed(OUTPUTS[0], TARGETS, 3).item() == 6.0
    assert own(number, reduction="sum").summed(OUTPUTS[0], TARGETS, 3).item() == 2.0


def weights_of(targets):
    return 1 + targets


def test_rows_are_weighted():
    loss = own(squares, weights=weights_of)
    assert loss.summed(OUTPUTS[0], TARGETS, 3).item() == 1 * 1 + 4 * 5 + 1 * 5
    assert loss.weight(TARGETS, 3) == 1 + 5 + 5
    assert loss.of_all(26.0, 13.0) == 2.0


def test_without_weights_every_row_counts_one():
    assert own(squares).weight(TARGETS, 3) == 3
    assert own(squares).of_all(6.0, 3.0) == 2.0


def test_a_sum_is_divided_by_nothing():
    loss = own(squares, reduction="sum")
    assert loss.weight(TARGETS, 3) == 1.0
    assert loss.of_all(6.0, 3.0) == 6.0


def test_the_weights_of_a_step_are_those_of_all_rows():
    batches = [
        MicroBatch((2, 3), 0, (torch.empty(3, 1),), TARGETS),
        MicroBatch((1, 0), 5, (torch.empty(0, 1),), TARGETS[:0]),
        MicroBatch((1, 2), 6, (torch.empty(2, 1),), TARGETS[:2]),
    ]
    assert own(squares).total(batches, 1) == 5.0
    assert own(squares, weights=weights_of).total(batches, 1) == 11.0 + 6.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_outputs_are_made_single_for_a_loss(dtype):
    def loss(outputs, targets):
        return outputs.sum(1)

    assert own(loss).summed(OUTPUTS[0].to(dtype), TARGETS, 3).dtype == torch.float32
    assert own(loss).summed(OUTPUTS[0], TARGETS, 3).dtype == torch.float64


def test_several_outputs_are_given_together():
    def loss(outputs, targets):
        first, second = outputs
        return squares(first, targets) + second[:, 0]

    assert own(loss).summed((*OUTPUTS, *OUTPUTS), TARGETS, 3).item() == 6 + 8


def test_the_figure_of_a_loss_is_made_of_sum_and_weight():
    score = OwnLossScore(own(squares, weights=weights_of), GRAPH)
    parts = [
        score.sums((OUTPUTS[0][part],), TARGETS[part], len(TARGETS[part]))
        for part in (slice(0, 1), slice(1, 3))
    ]
    assert [part.tolist() for part in parts] == [[1.0, 1.0], [25.0, 10.0]]
    assert score.figure(sum(parts), 3) == pytest.approx(26 / 11)


def test_cross_entropy_is_a_mean_over_samples():
    score = MeanCrossEntropy(GRAPH, PLAIN)
    found = score.sums((torch.zeros(4, 3),), torch.tensor([0, 1, 2, 0]), 4)
    assert found.tolist() == pytest.approx([4 * EVEN, 4])
    assert score.figure(found, 4) == pytest.approx(EVEN)


def test_cross_entropy_of_tokens_is_a_mean_over_tokens():
    score = MeanCrossEntropy(TOKENS, PLAIN)
    found = score.sums((torch.zeros(2, 5, 3),), torch.zeros(2, 5, dtype=torch.int64), 2)
    assert found.tolist() == pytest.approx([10 * EVEN, 10])
    assert score.figure(found, 2) == pytest.approx(EVEN)


def test_figures_of_classes_are_means():
    sums = torch.tensor([6.0, 3.0, 12.0, 4.0], dtype=torch.float64)
    assert ScoringOfClasses(GRAPH, PLAIN).figures(sums, 4) == {"loss": 0.5, "accuracy": 0.75}
    of_tokens = ScoringOfClasses(TOKENS, PLAIN).figures(sums, 2)
    assert of_tokens == {"loss": 0.5, "accuracy": 0.75, "perplexity": math.exp(0.5)}
    smoothed = ScoringOfClasses(TOKENS, CrossEntropy(label_smoothing=0.1)).figures(sums, 2)
    assert smoothed == {"loss": 0.5, "accuracy": 0.75}  # it is no perplexity's logarithm


def test_a_perplexity_may_be_infinite():
    assert perplexity(0.0) == 1.0
    assert perplexity(699.0) == math.exp(699.0)
    assert perplexity(1000.0) == math.inf


def test_a_metric_of_rows_is_a_mean():
    score = own_score("off", Metric(lambda outputs, y: (outputs[:, 0] - y).abs()), GRAPH)
    assert score.figure(score.sums(OUTPUTS, TARGETS, 3), 3) == pytest.approx(4 / 3)


def test_a_metric_of_sums_has_a_result():
    score = own_score(
        "ratio", Metric(lambda o, y: torch.stack([o.sum(), y.sum()]), result=_ratio), GRAPH
    )
    found = score.sums(OUTPUTS, TARGETS, 3)
    assert found.tolist() == [8.0, 8.0]
    assert score.figure(found + torch.tensor([0.0, 8.0]), 6) == 0.5


def _ratio(sums):
    return sums[0] / sums[1]


def test_a_metric_gets_several_outputs_together():
    score = own_score("m", Metric(lambda outputs, y: outputs[1][:, 0]), GRAPH)
    assert score.sums((*OUTPUTS, *OUTPUTS), TARGETS, 3).item() == 8.0


class Counts:
    """As torchmetrics has them."""

    def __init__(self):
        def dim_zero_sum(x):
            return x

        self._reductions = {"pair": dim_zero_sum, "rows": dim_zero_sum}
        self.pair, self.rows = torch.tensor([9, 9]), torch.tensor(9)

    def reset(self):
        self.pair, self.rows = torch.tensor([0, 0]), torch.tensor(0)

    def update(self, outputs, targets):
        self.pair += torch.tensor([1, int(targets.sum())])
        self.rows += len(outputs)

    def compute(self):
        assert self._update_count == 1
        assert self.pair.dtype == self.rows.dtype == torch.int64
        return self.pair[0] * 100 + self.pair[1] * 10 + self.rows


def test_states_of_a_metric_are_added_up():
    score = own_score("counts", Metric(Counts()), GRAPH)
    first, second = (score.sums(OUTPUTS, TARGETS, 3) for _ in range(2))
    assert first.tolist() == second.tolist() == [1.0, 8.0, 3.0]
    assert score.figure(first + second, 6) == 200 + 160 + 6


def test_all_sums_lie_one_behind_the_other():
    score = own_score(
        "ratio", Metric(lambda o, y: torch.stack([o.sum(), y.sum()]), result=_ratio), GRAPH
    )
    scores = {"loss": OwnLossScore(own(squares), GRAPH), "ratio": score}
    scoring = Scoring(scores, [(2,), (2,)])
    assert scoring.numel == 4
    found = scoring.sums(OUTPUTS, TARGETS, 3)
    assert found.tolist() == [6.0, 3.0, 8.0, 8.0]
    assert scoring.figures(found, 3) == {"loss": 2.0, "ratio": 1.0}
