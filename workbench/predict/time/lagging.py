"""How far behind the others the last rank of a group is, though all have the same to do.

Ranks are never equally fast: what takes t seconds takes each of them a little more or less, with

    variance = (unevenness t)^2 + jitter t

of which the first part lasts for a step and the second arises anew at every moment. Who meets
waits for the last of k, who is behind the mean by the expected largest of k normal values. So
a step with one meeting waits once for its slowest rank, and one with many meetings waits for many.

Sources: Petrini et al. 2003 (doi:10.1145/1048935.1050204) for noise that meetings amplify; Blom
1958 for the expected largest value.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from workbench.plan.machine import Machine
from workbench.predict.time.duration import Seconds
from workbench.predict.time.events import Grouping

# Whom the others expect later by so many standard deviations they do not overtake.
_NEAR = 2.0


def largest(counts: Seconds) -> Seconds:
    """The expected largest of so many standard normal values, to within 5 %."""
    found: Seconds = ndtri((counts - 0.375) / (counts + 0.25))
    return np.where(counts < 2, 0.0, found)


@dataclass
class Lagging:
    """Follows how long ranks have worked since they last met.

    Args:
        ranks: their number.
        unevenness: of the machine.
        jitter_s: of the machine.
    """

    ranks: int
    unevenness: float = 0.0
    jitter_s: float = 0.0
    _worked: Seconds = field(init=False)

    def __post_init__(self) -> None:
        self._worked = np.zeros(self.ranks)
        self._met: dict[bytes, Seconds] = {}
        self._all_met = np.zeros(self.ranks)

    @property
    def is_even(self) -> bool:
        """Whether nobody is ever behind."""
        return self.unevenness == 0 and self.jitter_s == 0

    @classmethod
    def on(cls, machine: Machine, ranks: int) -> "Lagging":
        """Of so many ranks of a machine."""
        return cls(ranks, machine.unevenness, machine.jitter_s)

    def work(self, seconds: Seconds) -> None:
        """Each rank has worked so long."""
        if not self.is_even:
            self._worked = self._worked + seconds

    def behind(self, groups: Grouping, arrive: Seconds) -> Seconds:
        """Seconds that the last rank of each rank's group comes after the one expected last.

        Args:
            groups: who meet.
            arrive: when each rank is expected.
        """
        if self.is_even or groups.count < 2:
            return np.zeros(self.ranks)
        since = self._worked - np.maximum(self._met.get(groups.key, 0.0), self._all_met)
        spread = np.sqrt((self.unevenness * since) ** 2 + self.jitter_s * since)
        near = arrive >= groups.latest(arrive) - _NEAR * spread
        contenders = groups.share(near) * groups.count
        return groups.latest(spread * largest(contenders))

    def meet(self, groups: Grouping, who: NDArray[np.bool_] | None = None) -> None:
        """The ranks of each group are together again.

        Args:
            groups: they.
            who: of the ranks; None: all.
        """
        if self.is_even:
            return
        before = self._met.get(groups.key, self._all_met)
        now = self._worked if who is None else np.where(who, self._worked, before)
        self._met[groups.key] = now
        if groups.is_one:
            self._all_met = now
