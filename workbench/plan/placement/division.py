"""The division of a batch's rows, and of tensors' elements, over ranks of unequal speed.

A rank's loss is the sum over its own rows divided by the rows of the whole batch, so that the sum
of all ranks' gradients is the gradient of the mean over the batch whatever rows each has: ranks are
weighted by the data that they process.

Source: Moreno-Alvarez et al. 2020 (doi:10.1007/s11227-020-03200-6), and 2022
(doi:10.1007/s11227-022-04399-2) for the weights.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from workbench.plan.errors import PlanError
from workbench.plan.placement.placement import apportion

# Elements; a multiple of every vector's length: kernels may round the rest of a tensor differently.
BLOCK = 64

_MOST_SHARE = 2**63  # shares are relative; products of one and rows, and sums, are then finite


def divide(lengths: Sequence[int], shares: Sequence[float]) -> list[tuple[int, ...]]:
    """Divides the consecutive elements of concatenated tensors over ranks.

    Every rank gets nearly its share of all, and begins a multiple of BLOCK after the beginning of a
    tensor; so it has at most BLOCK elements more or less than that. A share of zero gets nothing.

    Args:
        lengths: the lengths of the tensors, in elements.
        shares: the relative shares, one number >= 0 for each rank and not all zero [ranks].

    Returns:
        How many elements each rank gets of each tensor.
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


def is_share(value: object) -> bool:
    """Whether it is a number that can be the share of a rank: 0 or more, and finite."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= _MOST_SHARE


def checked_shares(shares: Sequence[float] | None, ranks: int) -> tuple[float, ...] | None:
    """The relative shares of ranks; None where all are equal.

    Args:
        shares: the shares, one for each rank; None: equal.
        ranks: the number of ranks.

    Raises:
        PlanError: the shares are not one number >= 0 for each rank, or all are zero.
    """
    if shares is None:
        return None
    given = tuple(shares) if isinstance(shares, Sequence) else (shares,)
    if not all(map(is_share, given)) or len(given) != ranks or not any(given):
        raise PlanError(
            f"shares must be {ranks} numbers >= 0, one for each rank and not all zero, "
            f"got {shares!r}"
        )
    return None if len(set(given)) == 1 else given


def shared_out(count: int, shares: tuple[float, ...] | None, ranks: int) -> tuple[int, ...]:
    """The rows of each rank, of `count` rows [ranks]; of equal shares the first get one more."""
    if shares is not None:
        return apportion(count, shares)
    size, more = divmod(count, ranks)  # as `apportion`, also for very many ranks
    return (size + 1,) * more + (size,) * (ranks - more)
