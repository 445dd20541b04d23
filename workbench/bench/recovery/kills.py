"""One kill during a run, and the outcome of the run."""

import math
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import psutil

from workbench.bench.report import Cell
from workbench.client.cluster import Cluster
from workbench.client.run.run import Run
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.plans.plan import Plan
from workbench.server.attempt import attempt_folder
from workbench.store.errors import ClusterError, RunError
from workbench.store.process import SERVER, SUPERVISOR, holder
from workbench.store.rank_files import WITHDRAWN, RankFiles
from workbench.store.record import AttemptRecord, JobRecord
from workbench.store.store import Store
from workbench.store.telemetry import RowReader

Kind = Literal[
    "engine SIGKILL", "engine SIGSTOP", "server SIGKILL", "supervisor SIGKILL", "controller SIGKILL"
]
Phase = Literal["step", "checkpoint", "re-cut", "scheduling"]
KINDS: tuple[Kind, ...] = ("engine SIGKILL", "engine SIGSTOP", "server SIGKILL")
OF_ALL: tuple[Kind, ...] = ("supervisor SIGKILL", "controller SIGKILL")  # which hit every run
PHASES: tuple[Phase, ...] = ("step", "checkpoint", "step", "re-cut", "scheduling")
CLOSE = 1e-9  # after a resharding, since another plan adds up in another order
END_S = 180.0
LOOK_S = 0.002
SERVER_S = 5.0  # from one server's end until the next one is at work, at most
_TIMES = (
    "server there",
    "detected in s",
    "ranks ended in s",
    "begun in s",
    "resumed in s",
    "steps lost",
)
_SIGNALS = {"engine SIGKILL": signal.SIGKILL, "engine SIGSTOP": signal.SIGSTOP}


@dataclass(frozen=True)
class Kill:
    """A kill, and its moment.

    Attributes:
        seed: the seed of the moment and of the rank.
        kind: the kind of kill.
        phase: the moment: a step (computing or in a collective, at random), a checkpoint that is
            being written, a resharding, or before the job's first step.
    """

    seed: int
    kind: Kind
    phase: Phase

    @classmethod
    def of(cls, seed: int, kinds: Sequence[Kind]) -> "Kill":
        """The kill of a seed; every kind comes in every phase."""
        return cls(seed, kinds[seed % len(kinds)], PHASES[seed // len(kinds) % len(PHASES)])


@dataclass
class Target:
    """An experiment that is run repeatedly on one cluster.

    Attributes:
        cluster: the cluster whose engines it runs on; attached to anew once its supervisor was
            killed.
        store: the store of the cluster's job server.
        experiment: the experiment that trains.
        other: the plan that it is resharded to.
        killed: the process ids of engines that were killed or stopped here.
        ended_servers: the times at which a server was killed, in seconds since the epoch.
    """

    cluster: Cluster
    store: Store
    experiment: Experiment
    other: Plan
    killed: set[int] = field(default_factory=set)
    ended_servers: list[float] = field(default_factory=list)

    def straight(self) -> float:
        """The final loss of a run without a kill."""
        return loss_of(self._begun().wait(END_S))

    def survive(self, kill: Kill, straight: float) -> dict[str, Cell]:
        """Runs the experiment with a kill, and returns the outcome as a row.

        Args:
            kill: the kill.
            straight: the final loss of a run without a kill.
        """
        run = self._begun()
        job = run.id
        assert job is not None
        self._await(kill, run, job)
        pid, at = self._do(kill, job)
        if kill.kind == "supervisor SIGKILL":
            self.cluster = attached_again(self.cluster, END_S)
            run = self.cluster.jobs[job]
        ended, difference = True, math.nan
        try:
            difference = abs(loss_of(run.wait(END_S)) - straight)
        except TimeoutError:
            ended = False
            run.stop()
        except (RunError, ClusterError):
            pass  # the record says how it ended
        last = self.store.job(job)
        lost = sum(self.was_killed(attempt) for attempt in last.attempts)
        # With its supervisor or controller all engines of a cluster end, those of one attempt.
        again = max(last.attempt - 1 - (1 if kill.kind in OF_ALL else lost), 0)
        close = difference <= (CLOSE if kill.phase == "re-cut" else 0.0)
        survived = last.state == "finished" and close and not again
        found: dict[str, Cell] = {
            "seed": kill.seed,
            "kind": kill.kind,
            "phase": kill.phase,
            "ended": last.state if ended else "hangs",
            "attempts": last.attempt,
            "more than once": again,
            "loss differs by": "" if math.isnan(difference) else difference,
            "survived": int(survived),
            "why not": "" if survived else _reasons(last),
            **self._times(last, pid, at),
        }
        shutil.rmtree(run.directory, ignore_errors=True)
        return found

    def was_killed(self, attempt: AttemptRecord) -> bool:
        """Whether an attempt was lost with an engine that was killed here, not by itself."""
        return any(_lost_with(attempt, pid) for pid in self.killed)

    def wait_for_spare(self) -> None:
        """Waits until all engines are there, the spare one too."""
        while any(engine.state not in ("idle", "busy") for engine in self.store.engines()):
            time.sleep(LOOK_S)

    def _begun(self) -> Run:
        return self.cluster.train(self.experiment)

    def _await(self, kill: Kill, run: Run, job: int) -> None:
        """Waits for the kill's moment, or the end of the run."""
        chance = random.Random(kill.seed)
        if kill.phase == "scheduling":
            time.sleep(chance.random() * 0.4)
            return
        steps = self.experiment.steps
        step = chance.randrange(steps // 4, steps // 2)
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
        """Waits until a condition holds, or the job has ended."""
        while not holds() and not self.store.job(job).has_ended:
            time.sleep(LOOK_S)

    def _do(self, kill: Kill, job: int) -> tuple[int, float]:
        """Kills; (the process id, the time in seconds since the epoch)."""
        chance = random.Random(-kill.seed)
        while True:
            if kill.kind in OF_ALL:
                if (found := self._of_all(kill.kind)) is None:
                    time.sleep(LOOK_S)
                    continue  # the one after the last kill is coming
                pid, number = found, signal.SIGKILL
            elif kill.kind == "server SIGKILL":
                if (server := holder(self.cluster.folder / SERVER)) is None:
                    continue  # another kill was before this one; the next server is coming
                pid, number = server.pid, signal.SIGKILL
            else:
                engines = [each for each in self.store.engines() if not each.is_assistant]
                free = [each.pid for each in engines if each.pid and each.job in (None, job)]
                if not (pids := self.store.job(job).pids or free):
                    time.sleep(LOOK_S)
                    continue
                pid, number = chance.choice(pids), _SIGNALS[kill.kind]
                self.killed.add(pid)
            at = time.time()
            with suppress(ProcessLookupError):  # another kill was before this one
                os.kill(pid, number)
                if kill.kind == "server SIGKILL":
                    self.ended_servers.append(at)
                return pid, at
            time.sleep(LOOK_S)

    def _of_all(self, kind: Kind) -> int | None:
        if kind == "controller SIGKILL":
            return controller_of(self.cluster)
        supervisor = holder(self.cluster.folder / SUPERVISOR)
        return None if supervisor is None else supervisor.pid

    def _times(self, record: JobRecord, pid: int, at: float) -> dict[str, Cell]:
        """The times of a run that lost an attempt: until that was noticed, and until it went on."""
        over = next((n for n, each in enumerate(record.attempts) if _lost_with(each, pid)), None)
        if over is None or over + 1 == len(record.attempts):
            return dict.fromkeys(_TIMES, "")
        lost, following = record.attempts[over : over + 2]
        known = (attempt_folder(record.directory, lost.number) / WITHDRAWN).stat().st_mtime
        again = RowReader(RankFiles(attempt_folder(record.directory, following.number), 0)).read(1)
        alone = not any(at - SERVER_S < ended < known for ended in self.ended_servers)
        found: tuple[Cell, ...] = (
            int(alone),
            known - at,
            lost.ended_at - at,
            following.started_at - at,
            again[0]["time"] - at if again else "",
            max(lost.step - following.resumed, 0),
        )
        return dict(zip(_TIMES, found, strict=True))


def controller_of(cluster: Cluster) -> int | None:
    """The process id of a cluster's controller; None while there is none."""
    supervisor = holder(cluster.folder / SUPERVISOR)
    with suppress(psutil.Error):
        for child in [] if supervisor is None else psutil.Process(supervisor.pid).children():
            if "ipyparallel.controller" in child.cmdline():
                return child.pid
    return None


def attached_again(cluster: Cluster, limit_s: float) -> Cluster:
    """The cluster whose supervisor was killed, attached to as another notebook would.

    Raises:
        TimeoutError: the supervisor does not end within the limit.
    """
    deadline = time.monotonic() + limit_s
    while holder(cluster.folder / SUPERVISOR) is not None:
        if time.monotonic() > deadline:
            raise TimeoutError("the supervisor does not end")
        time.sleep(LOOK_S)
    return Cluster.attach(cluster.folder)


def loss_of(run: Run) -> float:
    """The loss of the last step."""
    return float(run.metrics["loss"].iloc[-1])


def _reasons(record: JobRecord) -> str:
    """How a job, and its attempts, ended."""
    every = (record.reason, *(attempt.reason for attempt in record.attempts))
    return " | ".join(reason.replace("\n", " ")[:200] for reason in every if reason)


def _lost_with(attempt: AttemptRecord, pid: int) -> bool:
    return attempt.is_lost and f"(pid {pid})" in attempt.reason
