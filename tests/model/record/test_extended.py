"""Embeddings in modules that extend torch's are embeddings, and can be cut."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb

TOKENS, VOCABULARY, WIDTH = 5, 11, 6


class Scaled(nn.Embedding):
    """As Bart's and Gemma's: the table's rows, times a factor."""

    def __init__(self, *of, **given):
        super().__init__(*of, **given)
        self.register_buffer("factor", torch.tensor(3.0), persistent=False)

    def forward(self, ids):
        return super().forward(ids) * self.factor.to(self.weight.dtype)


class Other(nn.Embedding):
    """Reads another table than its own."""

    def forward(self, ids):
        return F.embedding(ids, self.weight * 2)


class Padded(nn.Embedding):
    """Has another padding than it says."""

    def forward(self, ids):
        return F.embedding(ids, self.weight, padding_idx=1)


class Net(nn.Module):
    def __init__(self, table, *, tied=False):
        super().__init__()
        self.table, self.head = table, nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = table.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.table(ids)))


def graph_of(table, **given):
    return wb.trace(Net(table, **given), input_shape=(TOKENS,), vocabulary=VOCABULARY)


@pytest.mark.parametrize("padding", [None, 2])
def test_an_extended_embedding_is_one(padding):
    graph = graph_of(Scaled(VOCABULARY, WIDTH, padding_idx=padding))
    table = graph["table"]
    assert (table.kind, table.target) == ("embedding", "torch.nn.Embedding")
    assert [weight.name for weight in table.weights] == ["table.weight"]
    (factor,) = graph["table.factor"].weights
    assert (factor.name, factor.persistent) == ("table.factor", False)


@pytest.mark.parametrize("table", [Other(VOCABULARY, WIDTH), Padded(VOCABULARY, WIDTH)])
def test_what_computes_something_else_is_none(table):
    assert all(layer.kind != "embedding" for layer in graph_of(table).layers)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", ["shard_in", "shard_out"])
def test_it_is_cut_though_its_type_is_read_elsewhere(scheme, tied):
    graph = graph_of(Scaled(VOCABULARY, WIDTH, padding_idx=2), tied=tied)
    plan = wb.Plan.data_parallel(graph, 2).with_layer("table", scheme=scheme, shares=(2, 1))
    piece = plan.flow.weights["table.weight"].piece_shape(0)
    assert piece == ((7, 6) if scheme == "shard_in" else (11, 4))
    assert ("head" in plan.layers) == tied
