"""Tensors that lie one after another, handed out in parts of consecutive elements."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

# Elements; a multiple of every vector's length: kernels may round the rest of a tensor otherwise.
BLOCK = 64


def divide(lengths: Sequence[int], shares: Sequence[float]) -> list[tuple[int, ...]]:
    """Hands out consecutive elements of tensors that lie one after another to ranks.

    Every rank gets nearly its share of all, and begins a multiple of BLOCK behind the begin of a
    tensor; so it has at most BLOCK elements more or less than that. A share of zero gets nothing.

    Args:
        lengths: of the tensors.
        shares: relative ones, one number >= 0 for each rank and not all zero.

    Returns:
        For each tensor, how many elements each rank gets.
    """
    ends, shared = list(accumulate(lengths)), list(accumulate(shares))
    total = ends[-1]
    borders = [0]
    for before in shared[:-1]:
        ideal = int(total * before / shared[-1])
        end = next((end for end in ends if ideal < end), total)
        begin = end - lengths[ends.index(end)]
        below = begin + (ideal - begin) // BLOCK * BLOCK
        above = min(below + BLOCK, end)
        borders.append(below if ideal - below <= above - ideal else above)
    borders.append(total)
    return [
        tuple(max(0, min(b, end) - max(a, end - n)) for a, b in pairwise(borders))
        for n, end in zip(lengths, ends, strict=True)
    ]
