"""Conversions of features that are cut block by block."""

import pytest
import torch

from workbench.layers.local.context import BatchContext
from workbench.layers.local.convert import ConvertLayout
from workbench.plan.placement.placement import ROWS, Conversion, Layout, Replicate, Shard

WHOLE = torch.arange(8.0).view(1, 8)
PIECES = Shard(1, (6, 2))
IN_BLOCKS = [[0, 1, 2, 4, 5, 6], [3, 7]]
IN_ORDER = [[0, 1, 2, 3, 4, 5], [6, 7]]


def converted(world, before, after, blocks):
    group = world.groups([("shard", (0, 1))])["shard", (0, 1)]
    layouts = (Layout(2, before), Layout(2, after))
    conversion = Conversion(*layouts, "same", (8,), blocks=blocks)
    context = BatchContext(world.rank, (1, 0), seed=0)
    convert = ConvertLayout(conversion, group, context, "a layer", learns=False)
    held = (IN_ORDER if blocks[0] == 1 else IN_BLOCKS)[world.rank]
    return convert(WHOLE if before == Replicate() else WHOLE[:, held])[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "blocks", "expected"),
    [
        (PIECES, Replicate(), (2, 1), [list(range(8))] * 2),
        (PIECES, Replicate(), (1, 1), [list(range(8))] * 2),
        (Replicate(), PIECES, (1, 2), IN_BLOCKS),
        (Replicate(), PIECES, (1, 1), IN_ORDER),
    ],
)
def test_blocks_are_taken_apart_and_put_together(on_ranks, before, after, blocks, expected):
    assert on_ranks(2, converted, before, after, blocks) == expected


def ahead(world):
    group = world.groups([("shard", (0, 1))])["shard", (0, 1)]
    conversion = Conversion(ROWS, Layout(2, Replicate()), "same", (3,), rows=2)
    context = BatchContext(world.rank, (0, 0), seed=0)
    convert = ConvertLayout(conversion, group, context, "a layer", learns=False)
    rows = ((1, 2), (2, 0))
    mine = [10.0 * world.rank + torch.arange(6.0 * each[world.rank]).view(-1, 3) for each in rows]
    for x, each in zip(mine, rows, strict=True):
        convert.start(x, each)
    begun, found = len(convert._ahead), []
    for x, each in zip(mine, rows, strict=True):
        context.set(each)
        found.append(convert(x)[:, 0].tolist())
    return begun, found, len(convert._ahead)


@pytest.mark.parametrize(("hosts", "begun"), [("ab", 2), ("aa", 0)])
def test_rows_that_a_sample_is_folded_into_are_gathered_ahead(on_ranks, hosts, begun):
    """Two passes, of which the second has rows on one rank alone; each sample has two rows."""
    whole = [[0.0, 3.0, 10.0, 13.0, 16.0, 19.0], [0.0, 3.0, 6.0, 9.0]]
    assert on_ranks(2, ahead, hosts=hosts) == [(begun, whole, 0)] * 2
