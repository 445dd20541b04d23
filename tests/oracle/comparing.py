"""One comparison for every kind of run: the library's, on ranks, against one process."""

import math
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.oracle.cases import REFUSALS, Case, graph_of
from tests.oracle.compared import Compared, cut_of
from tests.oracle.draws import NotSpecifiedError
from tests.oracle.expected import Expected
from tests.oracle.running import Leg, Ranks, Seen, on
from workbench.client.run.trying import try_out
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import (
    Experiment,
)
from workbench.plan.extension.user_object import OwnObjectError
from workbench.plan.plans.plan import Plan
from workbench.train.checkpoint.checkpoint import state_dict
from workbench.train.data.reading import DataError
from workbench.train.run.requests import RunRequests

# One may move by chance as little as nothing does.
_SHAKES = 3


@dataclass(frozen=True)
class Verdict:
    """What became of a case: "equal", "refused", "wrong" or, where torch refuses, "invalid"."""

    what: str
    why: str = ""

    @property
    def right(self) -> bool:
        return self.what != "wrong"


def judged(case: Case, ranks: Ranks) -> Verdict:
    """Runs a case in both ways, and says whether they agree.

    Args:
        case: what to run.
        ranks: runs a function on ranks, as `tests.ranks.Ranks.seated` does.
    """
    if case.net.runs() is None:
        return Verdict("invalid", "torch itself does not run it")
    try:
        experiment = case.run.of(case.cut.of(graph_of(case.net)))
        then = case.cut if case.then is None else case.then
        after = case.run.of(then.of(graph_of(case.net)))
    except REFUSALS as error:
        return _refused(error)
    except Exception as error:
        return Verdict("wrong", f"bare {type(error).__name__} before it runs: {error}")
    try:
        if case.run.data is None and Experiment.from_toml(experiment.to_toml()) != experiment:
            return Verdict("wrong", "the experiment is another one when it is read again")
        try_out(experiment)
        expected = Expected(case, experiment, after)
    except (OwnObjectError, DataError) as error:
        return _refused(error)
    except REFUSALS as error:
        return Verdict("wrong", f"the experiment cannot be read again: {error}")
    except NotSpecifiedError as error:
        return Verdict("wrong", f"accepted, though {error}")
    except (ValueError, RuntimeError) as error:
        if not case.cut.local or experiment.half:
            return Verdict("invalid", f"torch itself says {type(error).__name__}: {error}")
        return Verdict("wrong", f"accepted, though torch says {type(error).__name__}: {error}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            differences = list(_differences(case, experiment, after, expected, ranks, Path(folder)))
            for seed in range(_SHAKES):
                if not differences:
                    break
                expected.shaken(seed)
                again = Path(folder) / f"shaken-{seed}"
                again.mkdir()
                differences = list(_differences(case, experiment, after, expected, ranks, again))
            if differences and experiment.precision != "fp64" and expected.is_decided_by_rounding():
                return Verdict("invalid", "torch's own result is decided by rounding")
        except Exception as error:
            said = str(error).strip().splitlines() or [""]
            if late := LATE.search(f"{type(error).__name__}: {said[0]}"):
                return _refused(ValueError(late.group(2)))
            return Verdict("wrong", f"{type(error).__name__} while it runs: {said[0][:500]}")
    return Verdict("wrong", "; ".join(differences[:6])) if differences else Verdict("equal")


# What ranks say of what a user brought, when they look again.
LATE = re.compile(r"\b(OwnObject|Data|Trace|Experiment)Error: (.*)")
# Where it is: a line, a layer, or a field; and what to do: a verb that says so.
PLACE = re.compile(r"<net \w+>:\d+|layer '|'\w+(\.\w+)*'|^\w+: |^loss |^(train|test) data ")
REMEDY = re.compile(
    r"\b(use|build|keep|give|name|put|write|return|declare|call|make|pass|register|take|draw|set|"
    r"choose|valid|instead|rename|train|freeze|leave|say|built)\b"
)
BARE = re.compile(
    r": (Runtime|Assertion|Key|Attribute|Index|Value|NotImplemented|ZeroDivision)Error\b"
)


def _refused(error: Exception) -> Verdict:
    """Whether an error of the library says enough: where, why, and what to do."""
    text = str(error)
    if BARE.search(text):
        return Verdict("wrong", f"refused for an error of torch alone: {text}")
    if not PLACE.search(text):
        return Verdict("wrong", f"refused, but where? {text}")
    if not REMEDY.search(text):
        return Verdict("wrong", f"refused without a remedy: {text}")
    return Verdict("refused", text)


def _differences(
    case: Case,
    experiment: Experiment,
    after: Experiment,
    expected: Expected,
    ranks: Ranks,
    folder: Path,
) -> Iterator[str]:
    """What differs, in words."""
    module = case.net.build()
    weights = initialize(experiment.plan.graph, experiment.seed, folder, module=module)

    def leg(name: str, what: Experiment, resume: Path | None = None, stop: bool = False) -> Leg:
        (folder / name).mkdir(exist_ok=True)
        return Leg(what, weights, folder / name, resume, stop)

    plans = [experiment.plan] * experiment.steps
    if case.way == "resumed":
        first, outcome = on(ranks, leg("run", experiment, stop=True))
        yield from _stopped(first, outcome.step, experiment)
        assert outcome.checkpoint is not None
        rest, outcome = on(ranks, leg("run", after, Path(outcome.checkpoint)))
        seen = first + rest
        plans = [experiment.plan] + [after.plan] * (experiment.steps - 1)
    elif case.way == "re-cut":
        first_leg = leg("run", experiment)
        RunRequests(first_leg.directory).submit(after.plan)
        seen, outcome = on(ranks, first_leg)
        plans = [experiment.plan] + [after.plan] * (experiment.steps - 1)
    else:
        seen, outcome = on(ranks, leg("run", experiment))
    if len(seen) != experiment.steps:
        if outcome.reason != "diverged" or math.isfinite(expected.steps[len(seen)].loss):
            yield f"{len(seen)} steps of {experiment.steps}: {outcome.message}"
        return
    for step, plan, found in zip(expected.steps, plans, seen, strict=True):
        yield from Compared(expected, plan, found, step).all()
    assert outcome.checkpoint is not None
    yield from _taken_home(case, plans[-1], seen[-1], Path(outcome.checkpoint))
    if case.way == "again" or (case.way == "resumed" and case.then is None):
        again, _ = on(ranks, leg("again", experiment))
        yield from _unequal_bits(case.way, seen, again)


def _stopped(first: list[list[Seen]], step: int, experiment: Experiment) -> Iterator[str]:
    if experiment.steps > 1 and (len(first), step) != (1, 1):
        yield f"asked to stop before its first step, it made {step}"


def _unequal_bits(way: str, seen: list[list[Seen]], again: list[list[Seen]]) -> Iterator[str]:
    for index, (ones, others) in enumerate(zip(seen, again, strict=True)):
        for rank, (one, other) in enumerate(zip(ones, others, strict=True)):
            for name in one.pieces:
                if not torch.equal(one.pieces[name], other.pieces[name]):
                    yield f"{way}: other bits in {name} on rank {rank} after step {index}"
                    return


def _taken_home(case: Case, plan: Plan, last: list[Seen], checkpoint: Path) -> Iterator[str]:
    """`run.state_dict()` in the user's own module: to the bit what the ranks held at the end."""
    module = case.net.build().double()
    values = state_dict(checkpoint, plan.graph)
    try:
        module.load_state_dict(values)
    except RuntimeError as error:
        yield f"run.state_dict() does not load: {' '.join(str(error).split())}"
        return
    averages = state_dict(checkpoint, plan.graph, ema=True) if case.run.ema else {}
    for rank, seen in enumerate(last):
        for name, piece in seen.pieces.items():
            if name not in values:
                continue  # a buffer that is not saved
            average = seen.state.get(f"optimizer/ema/{name}", piece)
            for held, whole in ((piece, values), (average, averages or values)):
                if not torch.equal(held, cut_of(whole[name], plan.flow.weights[name], rank)):
                    yield f"run.state_dict() has other bits in {name} than rank {rank}"
                    return
