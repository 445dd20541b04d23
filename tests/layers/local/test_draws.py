"""What layers draw: the same under every split of the rows, and in every computation."""

import pytest
import torch

from tests.layers import drawing, nets
from workbench.layers.local.context import BatchContext
from workbench.layers.local.draws import DrawError, PlacedDraws
from workbench.layers.local.draws import drawing as entered
from workbench.model.tracing.trace import trace
from workbench.plan.graph.graph import Layer
from workbench.train.verify.whole_model import VerifyError, place_draws


def layer(*draws):
    return Layer("noise", "op", ("input",), (5,), (5,), draws=draws)


def drawn(rank, rows, shape, *draws, group_size=1, **batch):
    context = BatchContext(rank, rows, seed=7)
    context.set(rows, **batch)
    with entered(PlacedDraws([layer(*draws)], group_size, context)):
        return torch.randn(shape)


@pytest.mark.parametrize(("dim", "rows"), [(0, 1), (0, 3), (1, 1), (1, 2), (2, 1)])
def test_own_rows_draw_what_one_process_draws(dim, rows):
    def shape(count):
        sizes = [4, 5, 6]
        sizes[dim] = count * rows
        return tuple(sizes)

    split = (3, 0, 4, 1)
    whole = drawn(0, (8,), shape(8), dim)
    pieces = [drawn(rank, split, shape(n), dim) for rank, n in enumerate(split)]
    assert torch.equal(torch.cat(pieces, dim), whole)
    group = drawn(1, split, shape(3), dim, group_size=2)
    assert torch.equal(group, whole.narrow(dim, 0, 3 * rows))
    later = drawn(0, (2,), shape(2), dim, first_row=5)
    assert torch.equal(later, whole.narrow(dim, 5 * rows, 2 * rows))
    in_a_round = drawn(1, (1, 2), shape(2), dim, starts=(0, 4))
    assert torch.equal(in_a_round, whole.narrow(dim, 4 * rows, 2 * rows))


def test_rows_that_are_folded_draw_as_those_that_are_not():
    """An element's index in its sample is all that counts."""
    apart = drawn(0, (4,), (4, 3, 5), 0)
    assert torch.equal(drawn(0, (4,), (12, 5), 0).view(4, 3, 5), apart)
    assert torch.equal(drawn(0, (4,), (3, 4, 5), 1).transpose(0, 1), apart)


def test_what_has_no_batch_is_the_same_for_all_rows_and_ranks():
    first = drawn(0, (3, 1), (5,), -1)
    assert torch.equal(drawn(1, (3, 1), (5,), -1, first_row=9), first)
    assert not torch.equal(drawn(0, (3, 1), (5,), -1, step=1), first)


def test_every_tensor_of_a_call_is_another():
    context = BatchContext(0, (8,))
    with entered(PlacedDraws([layer(0, 0), layer(0)], 1, context)):
        first, second, other = torch.randn(8, 5), torch.randn(8, 5), torch.randn(8, 5)
    assert not torch.equal(first, second)
    assert torch.equal(first, other)  # a layer of the same name, anew


def test_what_is_left_to_be_drawn_is_named():
    draws = PlacedDraws([layer(0), layer(), layer(0)], 1, BatchContext(0, (8,)))
    with entered(draws):
        torch.randn(8, 5)
        assert draws.left() == "'noise'"
        assert draws.left() == ""  # it was taken


@pytest.mark.parametrize(
    ("shape", "draws", "reason"),
    [
        ((8, 5), (), "rank 1: 'noise' draws more random tensors"),
        ((7, 5), (0,), r"rank 1: layer 'noise' draws .* \(7, 5\), .* each of the 2 samples"),
        ((2, 5), (2,), "dimension 2 was traced"),
    ],
)
def test_what_was_not_traced_is_refused(shape, draws, reason):
    with pytest.raises(DrawError, match=reason):
        drawn(1, (3, 2), shape, *draws)


def test_a_model_that_draws_less_than_it_was_traced_to_is_refused():
    net = drawing.Functions
    graph, context = trace(net(), input_shape=net.shape), BatchContext(0, (4,))
    model = nets.made(net)
    place_draws(model, graph, context)
    images, _ = nets.batch(net, 4)
    assert torch.equal(model(images), model(images))
    with pytest.raises((VerifyError, DrawError)):
        model.eval()(images)  # which drops nothing at first
