"""Parts that lie anywhere arrive where they belong, and nowhere else."""

import random

import pytest
import torch

from workbench.comm import parts as parts_of_exchange
from workbench.comm.parts import MOST_BYTES, LocalCopy, SentPart, exchange_parts


def drawn(world_size, dtype, seed):
    """[(source, target, rows, columns)], some of a slot's size."""
    rng = random.Random(seed)
    large = MOST_BYTES // dtype.itemsize // 64
    shapes = [(rng.randint(1, 5), rng.choice((1, 7, 64))) for _ in range(20)] + [(large, 64)] * 3
    pairs = [rng.sample(range(world_size), 2) for _ in shapes]
    return [(*pair, *shape) for pair, shape in zip(pairs, shapes, strict=True)]


def exchange(world, cases):
    """Whether every part came, what is kept too, nothing else changed; the bytes recorded."""
    ranks = tuple(range(world.size))
    group = world.groups([("parts", ranks)])["parts", ranks]
    found = []
    for dtype, wanted in cases:
        parts, places = [], []
        for index, (source, target, rows, columns) in enumerate(wanted):
            around = torch.full((rows, columns + 2), 99).to(dtype)
            inner = around[:, 1:-1]
            if world.rank == source:
                inner.fill_(index)
            places.append((around, inner))
            own = inner if world.rank in (source, target) else None
            parts.append(SentPart(source, target, rows * columns, own))
        kept = torch.arange(MOST_BYTES // 4, dtype=torch.float64).view(-1, 64)  # of two slots
        there = torch.zeros(len(kept), 66, dtype=torch.float64)[:, 1:-1]
        before = sum(row.bytes for row in world.recorder.rows())
        exchange_parts(parts, dtype, group, [LocalCopy(kept, there)])
        received = sum(row.bytes for row in world.recorder.rows()) - before
        came = torch.equal(kept, there) and all(
            bool((inner == index).all()) and bool((around[:, 0] == 99).all())
            for index, (around, inner) in enumerate(places)
            if parts[index].tensor is not None
        )
        mine = sum(p.numel for p in parts if p.target == world.rank) * dtype.itemsize
        found.append((came, received == mine))
    return found


def test_parts_arrive(on_either):
    cases = [
        (dtype, drawn(3, dtype, seed)) for seed, dtype in enumerate((torch.float32, torch.int64))
    ]
    cases.append((torch.float64, []))
    assert on_either(3, exchange, cases) == [[(True, True)] * 3] * 3


def in_batches(world, cases):
    """The same through messages, of which each takes less than two of the larger parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts_of_exchange, "BATCH_BYTES", 256)
        found = exchange(world, cases)
    return found, [row.calls for row in world.recorder.rows()]


def test_parts_arrive_in_batches(on_ranks):
    wanted = [
        (0, 1, 5, 7),
        (1, 0, 2, 7),
        (0, 1, 3, 1),
        (1, 2, 2, 2),
        (2, 0, 4, 7),
        (0, 2, 1, 1),
        (1, 0, 4, 4),
        (1, 2, 60, 1),
        (2, 1, 2, 1),
    ]
    found = on_ranks(3, in_batches, [(torch.float32, wanted)], shared_memory=False)
    # 35 + 14 + 3 + 4 elements, 28 + 1 + 16, 60 + 2; at most 64 in one.
    assert found == [([(True, True)], [3])] * 3


def too_large(world):
    ranks = tuple(range(world.size))
    group = world.groups([("parts", ranks)])["parts", ranks]
    with pytest.raises(ValueError, match="at most 2,097,152 bytes"):
        exchange_parts([SentPart(0, 0, MOST_BYTES)], torch.float32, group)


def test_a_part_fits_into_a_slot(on_ranks):
    on_ranks(1, too_large)
