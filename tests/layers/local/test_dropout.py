"""Masks that no split can change."""

import pytest
import torch
from torch.testing import assert_close

from workbench.layers.local.context import BatchContext
from workbench.layers.local.draws import PlacedDropout
from workbench.model.record.draws import hashed, kept
from workbench.plan.placement.placement import ROWS, Layout, Replicate, Shard

SHAPE = (6, 4)


def dropped(rank, rows, layout, piece, *, p=0.4, mode="element", step=0):
    context = BatchContext(rank, rows, seed=7, step=step)
    layer = PlacedDropout(p, layout, SHAPE, 1, "drop", context, mode)
    return layer(piece)


def whole(mode="element", step=0):
    return dropped(0, (8,), ROWS, torch.ones(8, *SHAPE), mode=mode, step=step)


@pytest.mark.parametrize("mode", ["element", "row", "batch"])
def test_own_rows_drop_what_one_process_drops(mode):
    rows = (3, 0, 4, 1)
    pieces = [
        dropped(rank, rows, ROWS, torch.ones(n, *SHAPE), mode=mode) for rank, n in enumerate(rows)
    ]
    assert_close(torch.cat(pieces), whole(mode))


@pytest.mark.parametrize("dim", [1, 2])
def test_cut_features_drop_what_one_process_drops(dim):
    shard = Shard(dim, (1, SHAPE[dim - 1] - 1))
    rows = (5, 3, 0, 0)
    for rank in (0, 1):
        piece = torch.ones(8, *SHAPE).narrow(dim, *shard.span(rank))
        expected = whole().narrow(dim, *shard.span(rank))
        assert_close(dropped(rank, rows, Layout(2, shard), piece), expected)


def test_a_group_drops_alike():
    rows = (2, 3, 1, 2)
    for rank, (first, count) in enumerate([(0, 5), (0, 5), (5, 3), (5, 3)]):
        got = dropped(rank, rows, Layout(2, Replicate()), torch.ones(count, *SHAPE))
        assert_close(got, whole().narrow(0, first, count))


def test_every_step_and_every_layer_draws_anew():
    assert not torch.equal(whole(step=0), whole(step=1))
    context = BatchContext(0, (8,))
    assert context.key("a") != context.key("b")


def test_kept_elements_are_scaled_and_the_rate_is_right():
    keep = kept(hashed(123, torch.arange(1000)[:, None], torch.arange(1000)[None]), 0.7)
    assert keep.float().mean().item() == pytest.approx(0.7, abs=2e-3)
    # Neither rows nor features nor their neighbours are alike.
    assert keep.float().mean(0).std().item() == pytest.approx((0.21 / 1000) ** 0.5, rel=0.15)
    assert keep.float().mean(1).std().item() == pytest.approx((0.21 / 1000) ** 0.5, rel=0.15)
    both = (keep[:, 1:] & keep[:, :-1]).float().mean().item()
    assert both == pytest.approx(0.49, abs=4e-3)
    below = (keep[1:] & keep[:-1]).float().mean().item()
    assert below == pytest.approx(0.49, abs=4e-3)
    assert whole().unique().tolist() == pytest.approx([0.0, 1 / 0.6])


def test_nothing_is_dropped_where_nothing_should_be():
    x = torch.randn(8, *SHAPE)
    assert dropped(0, (8,), ROWS, x, p=0.0) is x
    assert_close(dropped(0, (8,), ROWS, x, p=1.0), torch.zeros_like(x))
    layer = PlacedDropout(0.5, ROWS, SHAPE, 1, "drop", BatchContext(0, (8,))).eval()
    assert layer(x) is x


def test_a_function_that_is_told_to_drop_does_so_in_evaluation_too():
    context, x = BatchContext(0, (8,), seed=7), torch.ones(8, *SHAPE)
    layer = PlacedDropout(0.4, ROWS, SHAPE, 1, "drop", context, always=True).eval()
    assert torch.equal(layer(x), whole())


def test_folded_rows_drop_what_whole_samples_drop():
    context, (tall, wide) = BatchContext(0, (8,), seed=7), SHAPE
    folded = PlacedDropout(0.4, ROWS, (wide,), tall, "drop", context)(torch.ones(8 * tall, wide))
    assert torch.equal(folded.view(8, tall, wide), whole())
