"""Many drawn cases on engines of their own, and what became of each."""

import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.engines import started
from tests.oracle.cases import Case
from tests.oracle.comparing import Verdict, judged
from tests.oracle.generated import cases
from tests.oracle.reducing import reduced
from tests.oracle.running import Ranks
from tests.ranks import Ranks as OnRanks


@dataclass(frozen=True)
class Wrong:
    """A kind of failure.

    Attributes:
        count: cases that failed so.
        case: the smallest, made smaller.
        why: what is wrong with it.
    """

    count: int
    case: Case
    why: str


@dataclass(frozen=True)
class Hunt:
    """What became of drawn cases."""

    verdicts: tuple[Verdict, ...]
    wrong: tuple[Wrong, ...]

    def count(self, what: str) -> int:
        return sum(verdict.what == what for verdict in self.verdicts)


def hunt(count: int, number: int, *, reduce: bool = True) -> Hunt:
    """Judges `count` cases that are drawn from a seed.

    Args:
        count: of cases.
        number: the seed; the same one draws the same cases.
        reduce: whether to make failures small, which takes some dozens of runs for each kind.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, started(Path(folder)) as client:
        ranks = OnRanks(client).seated
        found = drawn(count, number, lambda case: judged(case, ranks))
        wrong: dict[str, list[tuple[Case, str]]] = {}
        for case, verdict in found:
            if not verdict.right:
                wrong.setdefault(kind(verdict.why), []).append((case, verdict.why))
        small = [_small(some, ranks, reduce) for some in wrong.values()]
    return Hunt(tuple(verdict for _, verdict in found), tuple(small))


def drawn(count: int, number: int, judge: Callable[[Case], Verdict]) -> list[tuple[Case, Verdict]]:
    """The cases of a seed, judged one after the other."""
    found: list[tuple[Case, Verdict]] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def draw(case: Case) -> None:
        found.append((case, judge(case)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draw()
    return found


def kind(why: str) -> str:
    """What failures of one kind have in common: the text without names and numbers."""
    first = re.sub(r"<net \w+>:\d+|\b[mn]\d+\w*\b", "", why.split("; ")[0])
    return re.sub(r"-?\d[\d.]*(e[-+]\d+)?|\bnan\b|\binf\b", "", first)[:70]


def _small(some: list[tuple[Case, str]], ranks: Ranks, reduce: bool) -> Wrong:
    case, why = min(some, key=lambda one: len(repr(one[0])))
    if reduce:
        alike = kind(why)

        def fails(other: Case) -> bool:
            verdict = judged(other, ranks)
            return not verdict.right and kind(verdict.why)[:40] == alike[:40]

        case = reduced(case, fails)
        why = judged(case, ranks).why
    return Wrong(len(some), case, why)
