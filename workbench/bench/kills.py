"""One thing that is done to a run, and what becomes of the run."""

import math
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from torch import nn

from workbench.bench.report import Cell
from workbench.cluster.cluster import Cluster
from workbench.cluster.errors import ClusterError, RunError
from workbench.cluster.jobs.record import JobRecord
from workbench.cluster.jobs.store import Store
from workbench.cluster.rank_files import WITHDRAWN, RankFiles
from workbench.cluster.run import Run
from workbench.cluster.server.attempt import attempt_folder
from workbench.cluster.server.lock import LOCK
from workbench.cluster.telemetry import Tail
from workbench.plan.experiment import Experiment
from workbench.plan.plan import Plan

Kind = Literal["engine SIGKILL", "engine SIGSTOP", "server SIGKILL"]
Phase = Literal["step", "checkpoint", "re-cut", "scheduling"]
KINDS: tuple[Kind, ...] = ("engine SIGKILL", "engine SIGSTOP", "server SIGKILL")
PHASES: tuple[Phase, ...] = ("step", "checkpoint", "step", "re-cut", "scheduling")
CLOSE = 1e-6
END_S = 180.0
LOOK_S = 0.002
_SIGNALS = {"engine SIGKILL": signal.SIGKILL, "engine SIGSTOP": signal.SIGSTOP}


@dataclass(frozen=True)
class Kill:
    """What is done, and when.

    Attributes:
        seed: says the moment, and which rank.
        kind: what is done.
        phase: the moment: a step (computing or in a collective, as it comes), a checkpoint that
            is being written, a re-cut, or before the job's first step.
    """

    seed: int
    kind: Kind
    phase: Phase

    @classmethod
    def of(cls, seed: int) -> "Kill":
        """Every kind comes in every phase."""
        return cls(seed, KINDS[seed % len(KINDS)], PHASES[seed // len(KINDS) % len(PHASES)])


@dataclass(frozen=True)
class Target:
    """An experiment that is run again and again on one cluster.

    Attributes:
        cluster: whose engines it runs on, and
        store: what its job server knows.
        experiment: that trains.
        other: the plan of a re-cut.
        module: the model, where it has no name.
    """

    cluster: Cluster
    store: Store
    experiment: Experiment
    other: Plan
    module: nn.Module | None = None

    def straight(self) -> float:
        """The final loss of a run that nothing is done to."""
        return loss_of(self._begun().wait(END_S))

    def survive(self, kill: Kill, straight: float) -> dict[str, Cell]:
        """Runs it, does that to it, and says what became of it.

        Args:
            kill: what is done.
            straight: the final loss where nothing is.
        """
        run = self._begun()
        assert run.id is not None
        self._await(kill, run, run.id)
        at = self._do(kill, run.id)
        ended, difference = True, math.nan
        try:
            difference = abs(loss_of(run.wait(END_S)) - straight)
        except TimeoutError:
            ended = False
            run.stop()
        except (RunError, ClusterError):
            pass  # the record says how it ended
        last = self.store.job(run.id)
        allowed = 1 + sum(attempt.is_lost for attempt in last.attempts)
        survived = last.state == "finished" and difference <= CLOSE and last.attempt <= allowed
        found: dict[str, Cell] = {
            "seed": kill.seed,
            "kind": kill.kind,
            "phase": kill.phase,
            "ended": last.state if ended else "hangs",
            "attempts": last.attempt,
            "more than once": int(last.attempt > allowed),
            "loss differs by": "" if math.isnan(difference) else difference,
            "survived": int(survived),
            **_times(last, at),
        }
        shutil.rmtree(run.directory, ignore_errors=True)
        return found

    def wait_for_spare(self) -> None:
        """Returns when all engines are there, the assistant too."""
        while any(engine.state not in ("idle", "busy") for engine in self.store.engines()):
            time.sleep(LOOK_S)

    def _begun(self) -> Run:
        return self.cluster.train(self.experiment, module=self.module)

    def _await(self, kill: Kill, run: Run, job: int) -> None:
        """Returns at the kill's moment, or when the run has ended before it."""
        chance = random.Random(kill.seed)
        if kill.phase == "scheduling":
            time.sleep(chance.random() * 0.4)
            return
        steps = self.experiment.steps
        step = chance.randrange(steps // 8, steps // 2)
        self._until(job, lambda: any(row["step"] >= step for row in run.rows[-1:]))
        if kill.phase == "checkpoint":
            self._until(job, lambda: any(run.directory.glob("step-*.tmp")))
        elif kill.phase == "re-cut":
            with suppress(ClusterError):  # it has ended
                run.replan(self.other)
            time.sleep(chance.random() * 0.05)
        else:
            time.sleep(chance.random() * 0.1)

    def _until(self, job: int, holds: Callable[[], bool]) -> None:
        """Returns when it holds, or the job has ended."""
        while not holds() and not self.store.job(job).has_ended:
            time.sleep(LOOK_S)

    def _do(self, kill: Kill, job: int) -> float:
        """Does it; when, in seconds since the epoch."""
        chance = random.Random(-kill.seed)
        while True:
            if kill.kind == "server SIGKILL":
                pid, number = int((self.cluster.folder / LOCK).read_text()), signal.SIGKILL
            else:
                engines = [each for each in self.store.engines() if not each.is_assistant]
                free = [each.pid for each in engines if each.pid and each.job in (None, job)]
                if not (pids := self.store.job(job).pids or free):
                    time.sleep(LOOK_S)
                    continue
                pid = chance.choice(pids)
                number = _SIGNALS[kill.kind]
            at = time.time()
            with suppress(ProcessLookupError):  # another kill was before this one
                os.kill(pid, number)
                return at
            time.sleep(LOOK_S)


def loss_of(run: Run) -> float:
    """Of the last step."""
    return float(run.metrics["loss"].iloc[-1])


def _times(record: JobRecord, at: float) -> dict[str, Cell]:
    """Of a run that lost an attempt: until the server knew it, and until a step of the next."""
    over = next((n for n, attempt in enumerate(record.attempts) if attempt.is_lost), None)
    if over is None or over + 1 == len(record.attempts):
        return {"detected in s": "", "resumed in s": "", "steps lost": ""}
    lost, following = record.attempts[over : over + 2]
    known = attempt_folder(record.directory, lost.number) / WITHDRAWN
    again = Tail(RankFiles(attempt_folder(record.directory, following.number), 0)).read(1)
    return {
        "detected in s": known.stat().st_mtime - at,
        "resumed in s": again[0]["time"] - at if again else "",
        "steps lost": max(lost.step - following.resumed, 0),
    }
