"""Tensors as pieces of one flat buffer, and sums of pieces, by hand."""

import pytest
import torch
from torch.testing import assert_close

from workbench.comm.messages import flat as pieces
from workbench.comm.messages.flat import (
    added,
    blocks,
    even,
    pack,
    shaped,
    unpack,
)


def test_even_sizes_differ_by_one_at_most():
    assert even(7, 3) == (3, 2, 2)
    assert even(1, 3) == (1, 0, 0)
    assert even(0, 2) == (0, 0)


def test_a_piece_is_packed_after_another():
    x = torch.arange(6.0).view(2, 3)
    assert pack(x, 1, (1, 2)).tolist() == [0.0, 3.0, 1.0, 2.0, 4.0, 5.0]
    assert pack(x, 0, (1, 1)).tolist() == x.flatten().tolist()


def test_only_what_is_not_in_order_is_copied():
    x = torch.arange(6.0).view(1, 2, 3)
    assert pack(x, 0, (1,)).data_ptr() == x.data_ptr()
    assert pack(x, 1, (1, 1)).data_ptr() == x.data_ptr()
    across = torch.arange(6.0).view(2, 3).T
    assert pack(across, 0, (1, 2)).tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("shape", [(1, 4, 2), (3, 4, 2), (4, 4, 4)])
def test_what_is_packed_is_unpacked(shape, dim):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    sizes = even(shape[dim], 3)
    flat = pack(x, dim, sizes).clone()
    assert flat.shape == (x.numel(),)
    back = unpack(flat, shape, dim, sizes)
    assert_close(back, x, rtol=0, atol=0)
    assert back.is_contiguous()


def test_memory_is_taken_over_where_it_can_be():
    flat = torch.arange(6.0)
    assert unpack(flat.clone(), (2, 3), 1, (1, 2)).tolist() == [[0.0, 2.0, 3.0], [1.0, 4.0, 5.0]]
    whole = unpack(flat, (1, 2, 3), 1, (1, 1))
    assert whole.data_ptr() == flat.data_ptr()
    other = torch.arange(6.0)
    assert shaped(other, (2, 3)) is other
    assert other.shape == (2, 3)
    assert not other._is_view()


HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("given", [False, True])
def test_parts_are_added_in_their_order(dtype, count, given):
    parts = [torch.full((3,), 2.0**n, dtype=dtype) for n in range(count)]
    before = [part.clone() for part in parts]
    out = torch.full((3,), -1.0, dtype=dtype) if given else None
    total = added(parts, out)
    assert total.dtype == dtype
    assert total.tolist() == [2.0**count - 1] * 3
    assert (total is out) == given
    assert all(map(torch.equal, parts, before))


@pytest.mark.parametrize("dtype", HALVES)
def test_what_half_types_cannot_hold_is_not_lost_between_summands(dtype):
    small = 2.0 ** (-9 if dtype == torch.bfloat16 else -12)
    parts = [torch.tensor([1.0 if n == 0 else small], dtype=dtype) for n in range(9)]
    assert added(parts).item() == 1 + 8 * small
    assert sum(parts).item() == 1.0


def test_blocks_cover_a_tensor_once(monkeypatch):
    monkeypatch.setattr(pieces, "BLOCK_BYTES", 16)
    assert blocks(torch.zeros(9)) == [slice(0, 4), slice(4, 8), slice(8, 12)]
    assert blocks(torch.zeros(4, dtype=torch.float64)) == [slice(0, 2), slice(2, 4)]
    assert blocks(torch.zeros(0)) == []
