"""Conversions of features that are cut block by block."""

import pytest
import torch

from workbench.layers.context import BatchContext
from workbench.layers.convert import ConvertLayout
from workbench.plan.placement.layout import Conversion, Layout
from workbench.plan.placement.placement import Replicate, Shard

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
