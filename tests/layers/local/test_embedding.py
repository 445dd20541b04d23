"""A rank's part of an embedding, as one process: sums and pieces of torch's own."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from workbench.layers.local.embedding import local_embedding
from workbench.plan.graph.graph import Layer
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import Shard

LAYER = Layer("words", "embedding", ("input",), (3,), (3, 4), num_embeddings=7)
IDS = torch.tensor([[0, 6, 3], [3, 2, 2]])


def part(whole: nn.Embedding, shares: tuple[int, ...], rank: int) -> nn.Module:
    piece = whole.weight.detach().narrow(0, *Shard(0, shares).span(rank)).clone()
    local = nn.Embedding(len(piece), 4, _weight=piece)
    local.padding_idx = whole.padding_idx
    return local_embedding(local, LAYER, LayerPlan("shard_in", len(shares), shares), rank)


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("shares", [(3, 4), (7, 0), (2, 0, 5)])
def test_parts_of_a_vocabulary_are_summands(shares, padding):
    whole = nn.Embedding(7, 4, padding_idx=padding).double()
    parts = [part(whole, shares, rank) for rank in range(len(shares))]
    assert_close(sum(one(IDS) for one in parts), whole(IDS))
    grad = torch.randn(2, 3, 4, dtype=torch.float64)
    for module in (whole, *parts):
        module(IDS).backward(grad)
    assert_close(torch.cat([one.weight.grad for one in parts]), whole.weight.grad)


@pytest.mark.parametrize(("token", "choice"), [(7, LayerPlan()), (-1, LayerPlan("shard_in", 1))])
def test_a_token_that_is_not_in_the_vocabulary_is_named(token, choice):
    local = local_embedding(nn.Embedding(7, 4), LAYER, choice, 0)
    with pytest.raises(IndexError, match=f"layer 'words': token {token} is not in its vocabulary"):
        local(torch.tensor([[0, token, 1]]))
