"""What a dashboard's controls do, each on a thread of its own; the view is told how it went."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from workbench.client.engines import Engines
from workbench.widgets.dashboard.runs import ENDED, Run

Content = Mapping[str, Any]
Action = Callable[[Run, Content], str]

WAIT_S = 60.0
ADVICE = {
    "stop": "run.stop() in a cell says more.",
    "pause": "run.pause() in a cell says more.",
    "resume": "run.resume() in a cell says more; print(run.error) why it ended.",
    "checkpoint": "The run goes on; print(run.notes) says what it noted.",
    "lr": "The run goes on at the rate that it had.",
    "kill": "print(run.cluster) shows which engines are there.",
    "halt": "print(run.cluster) shows which engines are there.",
    "release": "print(run.cluster) shows which engines are there.",
    "slow": "print(run.cluster) shows which engines are there.",
}
DOING = {
    "stop": "Asking all ranks to stop after their step …",
    "pause": "Asking all ranks for a checkpoint and their engines …",
    "resume": "Going on …",
    "checkpoint": "A checkpoint is written after the current step …",
    "lr": "All ranks change after their current step …",
    "kill": "Ending the engine …",
    "halt": "Stopping the engine where it stands …",
    "release": "Letting the engine go on …",
    "slow": "Slowing the engine …",
}
FAULTS = ("kill", "halt", "release", "slow")
_NO_ENGINES = "the run holds no engines here: faults are for runs of a cluster that is attached"


def possible(run: Run, state: str) -> dict[str, str]:
    """For each control "" where it can be used, or why not."""
    ended = f"the run has {'failed' if state == 'failed' else 'ended'}" if state in ENDED else ""
    held = ended or ("" if run.cluster is not None else _NO_ENGINES)
    if not held and state == "paused":
        held = "the run is paused and holds no engines"
    if state == "finished":
        resume = "all steps are done"
    else:
        resume = "" if state in ("paused", *ENDED) else "the run goes on already"
    waits = "" if state == "running" else f"the run is {state}: it makes no steps now"
    return {
        "stop": ended,
        "pause": ended or ("it is paused already" if state == "paused" else ""),
        "resume": resume,
        "checkpoint": ended or waits,
        "lr": ended or waits,
        "fault": held,
    }


def work_of(name: str) -> Action:
    """What a control does; it gives a sentence on what came of it.

    Raises:
        ValueError: there is no such control.
    """
    if name not in _WORK:
        raise ValueError(f"a dashboard has no control {name!r}; there are {', '.join(_WORK)}")
    return _WORK[name]


def _stop(run: Run, _: Content) -> str:
    run.stop()
    return "Asked to stop after the current step."


def _pause(run: Run, _: Content) -> str:
    run.pause()
    return "Asked to pause; a checkpoint is left."


def _resume(run: Run, _: Content) -> str:
    run.resume()
    return "Goes on from the newest checkpoint."


def _checkpoint(run: Run, _: Content) -> str:
    done = run.checkpoint_now().wait(WAIT_S)
    return f"Checkpoint after step {done.step:,}, in {done.seconds:.2g} s."


def _lr(run: Run, content: Content) -> str:
    value = _number(content.get("value"), "a learning rate")
    done = run.set_lr(value).wait(WAIT_S)
    return f"Learning rate {value:g} since step {done.step:,}."


def _kill(run: Run, content: Content) -> str:
    cluster, rank, engine = _engine(run, content)
    cluster.kill(engine)
    return (
        f"Rank {rank} (engine {engine}) was killed; the job goes on from its newest checkpoint "
        "on another engine."
    )


def _halt(run: Run, content: Content) -> str:
    cluster, rank, engine = _engine(run, content)
    cluster.pause(engine)
    return f"Rank {rank} (engine {engine}) stands still; the others wait for it."


def _release(run: Run, content: Content) -> str:
    cluster, rank, engine = _engine(run, content)
    cluster.slow(engine, 1.0)
    cluster.unpause(engine)
    return f"Rank {rank} (engine {engine}) goes on as fast as it can."


def _slow(run: Run, content: Content) -> str:
    cluster, rank, engine = _engine(run, content)
    factor = _number(content.get("factor"), "a factor")
    cluster.slow(engine, factor)
    return f"Rank {rank} (engine {engine}) is {factor:g} times slower."


def _engine(run: Run, content: Content) -> tuple[Engines, int, int]:
    """The cluster, a rank, and the engine that it is on."""
    cluster, rank, engines = run.cluster, content.get("rank"), run.engines
    if cluster is None or not engines:
        raise ValueError(_NO_ENGINES)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < len(engines):
        raise ValueError(f"no rank {rank!r}: there are 0 to {len(engines) - 1}")
    return cluster, rank, engines[rank]


def _number(given: object, what: str) -> float:
    try:
        value = float(str(given))
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{what} is a positive number, such as 0.05; got {given!r}")
    return value


_WORK: dict[str, Action] = {
    "stop": _stop,
    "pause": _pause,
    "resume": _resume,
    "checkpoint": _checkpoint,
    "lr": _lr,
    "kill": _kill,
    "halt": _halt,
    "release": _release,
    "slow": _slow,
}
