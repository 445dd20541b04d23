"""Samples that losses and metrics are tried on."""

from dataclasses import replace

import pytest
import torch

from tests.plan.graphs import Builder, mlp
from workbench.plan.experiment.task import TorchData
from workbench.plan.graph.graph import Input
from workbench.train.data.datasets import open_data
from workbench.train.data.reading import DataError
from workbench.train.step.trial import ELEMENTS, ROWS, Trial, check_classes

CPU = torch.device("cpu")
GRAPH = mlp(2, 4, 3)


class Numbers:
    """Sample i has the target i."""

    num_classes = None

    def __init__(self, length, dtype=torch.int64):
        self.length, self.dtype = length, dtype

    def __len__(self):
        return self.length

    def batch(self, indices, epoch=-1):
        return torch.zeros(len(indices), 2), {"number": indices.to(self.dtype)}


def test_few_samples_are_all_taken():
    tried = Trial.of(GRAPH, Numbers(5), CPU, torch.float64)
    assert tried.rows == 5
    assert tried.targets["number"].tolist() == [0, 1, 2, 3, 4]
    ((output,), kind) = tried.outputs, tried.outputs[0].dtype
    assert (tuple(output.shape), kind) == ((5, 3), torch.float64)
    assert 0.05 <= float(output.min()) < 0.25
    assert 0.8 < float(output.max()) <= 0.95


def test_of_many_samples_some_are_taken_from_all_over():
    tried = Trial.of(GRAPH, Numbers(10 * ROWS), CPU, torch.float32)
    assert tried.rows == ROWS == 64
    assert tried.targets["number"].tolist() == list(range(0, 640, 10))


def test_of_a_stream_the_first_are_taken():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return ((torch.zeros(2), index) for index in range(200))

    data = open_data(TorchData(train=Stream(), samples=(200, 0)), (Input((2,)),), 3, "train")
    tried = Trial.of(GRAPH, data, CPU, torch.float32)
    assert tried.targets.tolist() == list(range(64))


def test_targets_take_the_type_of_outputs():
    tried = Trial.of(GRAPH, Numbers(3, torch.float32), CPU, torch.float64)
    assert tried.targets["number"].dtype == torch.float64


def test_outputs_are_the_same_each_time():
    one, two = (Trial.of(GRAPH, Numbers(4), CPU, torch.float32) for _ in range(2))
    assert torch.equal(one.outputs[0], two.outputs[0])


def trial():
    return Trial(
        GRAPH, 3, (torch.arange(6.0).view(6, 1), torch.arange(3.0)), torch.tensor([7, 8, 9])
    )


def test_rows_are_cut_with_all_that_is_theirs():
    first, rest = trial().cut(1)
    assert (first.rows, rest.rows) == (1, 2)
    assert [output.flatten().tolist() for output in first.outputs] == [[0, 1], [0]]
    assert [output.flatten().tolist() for output in rest.outputs] == [[2, 3, 4, 5], [1, 2]]
    assert (first.targets.tolist(), rest.targets.tolist()) == ([7], [8, 9])


def test_the_rows_of_pairs_are_collated_and_no_others():
    asked = []

    def collated(begin, end):
        asked.append((begin, end))
        return torch.arange(begin, end)

    pairs = Trial(GRAPH, 5, (torch.arange(5.0),), torch.arange(5), collated).pairs(8)
    assert [(*pair.outputs[0].tolist(), *pair.targets.tolist()) for pair in pairs] == [
        (0, 1, 0, 1),
        (2, 3, 2, 3),
    ]
    assert asked == [(0, 2), (2, 4)]


@pytest.mark.parametrize("at", [0, 3])
def test_parts_without_rows_are_left_out(at):
    (whole,) = trial().cut(at)
    assert (whole.rows, whole.targets.tolist()) == (3, [7, 8, 9])


def test_it_says_what_was_tried():
    assert str(trial()) == "outputs of shape (6, 1) and (3,) and the targets of 3 samples"


def test_of_large_outputs_fewer_rows_are_taken():
    graph = Builder((2,)).linear("head", ELEMENTS // 7).graph()
    assert Trial.of(graph, Numbers(1000), CPU, torch.float32).rows == 7
    graph = Builder((2,)).linear("head", ELEMENTS).graph()
    assert Trial.of(graph, Numbers(1000), CPU, torch.float32).rows == 2
    assert Trial.of(graph, Numbers(1), CPU, torch.float32).rows == 1


class Labels:
    """Samples with these labels."""

    num_classes = None

    def __init__(self, labels):
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def batch(self, indices, epoch=-1):
        return torch.zeros(len(indices), 2), self.labels[indices]


TOKENS = replace(Builder((5, 2)).linear("head", 3).graph(), inputs=(Input((5,), vocabulary=3),))
PLACES = Builder((3, 5)).same("scores", "elementwise").graph()


@pytest.mark.parametrize(
    ("graph", "labels"),
    [
        (GRAPH, torch.tensor([0, 2])),
        (GRAPH, torch.tensor([0, 2], dtype=torch.uint8)),
        (TOKENS, torch.full((2, 5), 2)),
        (TOKENS, torch.full((2, 5), 2, dtype=torch.uint8)),
        (PLACES, torch.full((2, 5), 2)),
    ],
)
def test_classes_that_are_scored_are_taken(graph, labels):
    check_classes(graph, Labels(labels))


@pytest.mark.parametrize(
    ("graph", "labels", "text"),
    [
        (GRAPH, torch.tensor([0, 3]), "2 samples .* label 3 is none of the 3 .* 0 to 2; .* loss="),
        (GRAPH, torch.tensor([-100, 2]), r"label -100 .*CrossEntropy\(ignore_index=-100\)"),
        (GRAPH, torch.rand(2), "labels are torch.float32; .* 0 to 2, as torch.int64, and loss="),
        (GRAPH, torch.rand(2, 3), "labels are torch.float32"),
        (GRAPH, torch.ones(2).int(), r"labels are torch.int32; .* y.long\(\) makes them"),
        (GRAPH, torch.ones(2).bool(), "labels are torch.bool"),
        (GRAPH, torch.ones(2, 1).long(), r"whose labels are \(\), got \(1,\); .* 0 to 2"),
        (TOKENS, torch.full((2, 5), 3), "label 3 is none of the 3 classes"),
        (TOKENS, torch.full((2,), 2), r"whose labels are \(5,\), got \(\)"),
        (PLACES, torch.full((2, 5), 3), "label 3 is none of the 3 classes"),
        (PLACES, torch.full((2, 5), 2, dtype=torch.uint8), "labels are torch.uint8"),
    ],
)
def test_what_cross_entropy_does_not_take_is_refused(graph, labels, text):
    with pytest.raises(DataError, match=text):
        check_classes(graph, Labels(labels))


def test_targets_that_are_no_tensor_are_no_classes():
    with pytest.raises(DataError, match="targets are dict, no tensor of labels; cross-entropy"):
        check_classes(GRAPH, Numbers(3))


def test_classes_are_looked_at_without_scores():
    """Those of these samples would take a hundred times the memory of any machine."""
    graph = Builder((2,)).linear("head", 2**50).graph()
    check_classes(graph, Labels(torch.tensor([0, 2**50 - 1])))
