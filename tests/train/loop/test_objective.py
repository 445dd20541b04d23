"""Scores of classes and the labels of the same rows, by hand."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.plan.graphs import Builder, mlp
from workbench.comm.groups.group import Group
from workbench.comm.messages.recorder import Recorder
from workbench.layers.local.loss import PLAIN
from workbench.plan.graph.graph import Input
from workbench.train.data.reading import DataError
from workbench.train.step.loss import Scores

GRAPH = mlp(4, 3)
TOKENS = replace(Builder((5, 4)).linear("head", 3).graph(), inputs=(Input((5, 4), vocabulary=3),))


def scores(logits, labels, graph=GRAPH):
    return Scores.whole(graph, graph.outputs[0], torch.tensor(logits), torch.tensor(labels))


def test_hits_are_rows_whose_class_scores_highest():
    found = scores([[3.0, 1.0, 2.0], [0.0, 1.0, 2.0], [5.0, 1.0, 2.0]], [0, 1, 0])
    assert found.hits().item() == 2
    assert found.is_counted


def test_cross_entropy_is_that_of_torch():
    logits, labels = [[3.0, 1.0, 2.0], [0.0, 1.0, 2.0]], [2, 1]
    expected = F.cross_entropy(torch.tensor(logits), torch.tensor(labels), reduction="sum")
    assert scores(logits, labels).cross_entropy().item() == pytest.approx(expected.item())


def test_tokens_are_scored_one_by_one():
    logits = torch.zeros(1, 5, 3)
    logits[0, 1, 2] = logits[0, 3, 1] = 1.0
    found = scores(logits.tolist(), [[0, 2, 0, 0, 1]], TOKENS)
    assert found.logits.shape == (5, 3)
    assert found.hits().item() == 3


def test_only_the_first_rank_of_a_group_counts():
    def counted(rank):
        group = Group("shard", (0, 1), rank, Recorder(), link=object())
        return Scores(torch.zeros(1, 3), torch.zeros(1), None, group, "head", PLAIN).is_counted

    assert (counted(0), counted(1)) == (True, False)


@pytest.mark.parametrize(("label", "fits"), [(-1, False), (0, True), (2, True), (3, False)])
def test_a_label_is_one_of_the_classes(label, fits):
    logits = [[0.0, 0.0, 0.0]] * 2
    if fits:
        assert scores(logits, [1, label]).labels.tolist() == [1, label]
        return
    with pytest.raises(DataError, match=rf"label {label} is none of the 3 .* 'fc0' .* 0 to 2;"):
        scores(logits, [1, label])


def test_labels_have_the_shape_of_scores():
    with pytest.raises(DataError, match=r"whose labels are \(\), got \(1,\)"):
        scores([[0.0, 0.0, 0.0]], [[1]])
    with pytest.raises(DataError, match=r"whose labels are \(5,\), got \(\)"):
        scores(torch.zeros(1, 5, 3).tolist(), [1], TOKENS)


def test_bytes_are_labels():
    found = Scores.whole(GRAPH, "fc0", torch.eye(3), torch.tensor([0, 2, 2], dtype=torch.uint8))
    assert (found.labels.dtype, found.hits().item()) == (torch.int64, 2)


def test_no_rows_have_no_wrong_labels():
    empty = torch.zeros(0, dtype=torch.int64)
    assert Scores.whole(GRAPH, "fc0", torch.zeros(0, 3), empty).hits().item() == 0
