"""How the rows of a batch are shared out over ranks of unequal speed.

A rank's loss is the sum over its own rows divided by the rows of the whole batch, so that the sum
of all ranks' gradients is the gradient of the mean over the batch whatever rows each has: ranks
are weighted with the data that they process.

Source: Moreno-Alvarez et al. 2020 (doi:10.1007/s11227-020-03200-6), and 2022
(doi:10.1007/s11227-022-04399-2) for the weights.
"""

import math
from collections.abc import Sequence

from workbench.plan.errors import PlanError
from workbench.plan.placement import apportion


def checked(shares: Sequence[float] | None, ranks: int) -> tuple[float, ...] | None:
    """Relative shares of ranks; None where all are equal.

    Args:
        shares: one for each rank; None: equal.
        ranks: their number.

    Raises:
        PlanError: not one number >= 0 for each rank, or all are zero.
    """
    if shares is None:
        return None
    given = tuple(shares) if isinstance(shares, Sequence) else (shares,)
    numbers = all(
        isinstance(s, int | float) and not isinstance(s, bool) and math.isfinite(s) and s >= 0
        for s in given
    )
    if not numbers or len(given) != ranks or not any(given):
        raise PlanError(
            f"shares must be {ranks} numbers >= 0, one for each rank and not all zero, "
            f"got {shares!r}"
        )
    return None if len(set(given)) == 1 else given


def shared_out(count: int, shares: tuple[float, ...] | None, world_size: int) -> tuple[int, ...]:
    """The rows of each rank, of `count` rows."""
    return apportion(count, shares or (1,) * world_size)
