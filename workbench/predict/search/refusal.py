"""Memory limits: parsing them, and the error for one that is too tight."""

import math
import re

from workbench.plan.io.errors import PlanError
from workbench.plan.io.units import size
from workbench.plan.plans.plan import Plan

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_WRITTEN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")


class MemoryLimitError(PlanError):
    """No plan fits into a memory limit.

    Attributes:
        plan: the plan with the least memory that was found.
        needed: the bytes that the plan needs, on the rank that needs most.
        least: the bytes that every plan needs at least.
    """

    def __init__(self, text: str, plan: Plan, needed: int, least: int) -> None:
        super().__init__(text)
        self.plan, self.needed, self.least = plan, needed, least


def refusal(limit: int, plan: Plan, needed: int, least: float, batch_size: int) -> MemoryLimitError:
    """The error for a limit into which no plan fits, or none that was found.

    Args:
        limit: the memory limit of a rank, in bytes.
        plan: the plan with the least memory that was found.
        needed: the bytes that the plan needs, on the rank that needs most.
        least: the bytes that every plan needs at least.
        batch_size: the samples of a step over all ranks.
    """
    least = min(int(min(least, 2**62)), needed)
    every = "which no plan needs less than"
    if least < needed:
        every = f"and every plan at least {size(least)}, a factor of {needed / least:.2f} below"
    return MemoryLimitError(
        f"memory_limit {size(limit)}: the leanest plan found for {plan.graph.source.name} on "
        f"{plan.world_size} ranks needs {size(needed)} ({needed:,} bytes), {every}; "
        f"the error's `plan` is that plan. Valid are a larger limit, more ranks, a smaller batch "
        f"than {batch_size}, or an experiment that goes through it in micro-batches (`accumulate`)",
        plan,
        needed,
        least,
    )


def bytes_of(limit: float | str) -> int:
    """The bytes of a number or of text such as "2GiB" or "800 MB".

    Raises:
        PlanError: neither a number nor such text, or not positive.
    """
    found: float = math.nan
    if isinstance(limit, str):
        match = _WRITTEN.fullmatch(limit)
        if match and match[2].upper() in _UNITS:
            found = float(match[1]) * _UNITS[match[2].upper()]
    elif isinstance(limit, int | float) and not isinstance(limit, bool):
        found = float(limit)
    if not 0 < found < math.inf:
        raise PlanError(
            f"memory_limit must be a positive number of bytes, or text such as '2GiB', "
            f"got {limit!r}"
        )
    return int(found)
