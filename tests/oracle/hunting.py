"""Many drawn cases on engines of their own, and what became of each.

`python -m tests.oracle.hunting SEED` reads "FIRST STOP" of some cases from each line of its input,
and writes what became of all so far as a line of JSON; at the end of the input once more, with
failures made small. `python -m workbench.bench exactness --random N` is for people.
"""

import json
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.engines import started
from tests.oracle.cases import Case
from tests.oracle.comparing import Verdict, judged
from tests.oracle.generated import numbered
from tests.oracle.reducing import reduced
from tests.oracle.running import Ranks
from tests.ranks import Ranks as OnRanks
from tests.ranks import gpus

VERDICTS = ("equal", "refused", "invalid", "wrong")


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
        """Cases of one verdict."""
        return sum(verdict.what == what for verdict in self.verdicts)

    @property
    def refused(self) -> list[tuple[str, int]]:
        """One text of each kind of refusal, and how often there was such a one."""
        texts = [verdict.why for verdict in self.verdicts if verdict.what == "refused"]
        first = {kind(text): text for text in reversed(texts)}
        return [(first[k], n) for k, n in Counter(map(kind, texts)).most_common()]


def hunt(seed: int, batches: Iterable[Sequence[int]]) -> Iterator[Hunt]:
    """What became of the cases of these numbers after each batch; at last with failures reduced.

    Reducing takes some dozens of runs for each kind of failure.
    """
    torch.set_num_threads(1)
    with Engines() as engines:
        ranks = engines.seated
        found: list[tuple[Case, Verdict]] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about what drawn modules do
            for batch in batches:
                for case in (numbered(seed, index) for index in batch):
                    found.append((case, judged(case, ranks)))
                yield _hunt(found, ranks, reduce=False)
        yield _hunt(found, ranks, reduce=True)


def _hunt(found: Sequence[tuple[Case, Verdict]], ranks: Ranks, reduce: bool) -> Hunt:
    wrong: dict[str, list[tuple[Case, str]]] = {}
    for case, verdict in found:
        if not verdict.right:
            wrong.setdefault(kind(verdict.why), []).append((case, verdict.why))
    small = [_small(some, ranks, reduce) for some in wrong.values()]
    return Hunt(tuple(verdict for _, verdict in found), tuple(small))


class Engines(ExitStack):
    """Engines that are started anew where a case has killed one; on GPUs, where there are any."""

    ranks: OnRanks | None = None

    def seated(self, *args: Any, **limits: float) -> list[Any]:
        if self.ranks is None or self.ranks.died:
            self.close()
            folder = self.enter_context(tempfile.TemporaryDirectory())
            client = self.enter_context(started(Path(folder)))
            self.ranks = OnRanks(client, gpus() or ("cpu",))
        return self.ranks.seated(*args, **limits)


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


def main(seed: int) -> None:
    """Judges what the input asks for."""
    answers, sys.stdout = sys.stdout, sys.stderr  # a drawn module may print
    batches = (range(*map(int, line.split())) for line in sys.stdin)
    for found in hunt(seed, batches):
        content = {
            "verdicts": {what: found.count(what) for what in VERDICTS},
            "refused": found.refused,
            "wrong": [(wrong.count, wrong.why, repr(wrong.case)) for wrong in found.wrong],
        }
        print(json.dumps(content), file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
