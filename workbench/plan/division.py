"""Tensors that lie one after another, handed out in near-equal parts of consecutive elements."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

# Elements; a multiple of every vector's length: kernels may round the rest of a tensor otherwise.
BLOCK = 64


def divide(lengths: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Hands out consecutive elements of tensors that lie one after another to `count` ranks.

    Every rank gets near 1/count of all, and begins a multiple of BLOCK behind the begin of a
    tensor; so it has at most BLOCK elements more or less than that.

    Args:
        lengths: of the tensors.
        count: of ranks.

    Returns:
        For each tensor, how many elements each rank gets.
    """
    ends = list(accumulate(lengths))
    total = ends[-1]
    borders = [0]
    for rank in range(1, count):
        ideal = total * rank // count
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
