"""A cluster to which faults happen, one after the other.

What is promised: a run ends with the losses of an undisturbed one, to the last bit (to 1e-9 after a
re-cut), in whatever attempt; after its supervisor was killed, once somebody attaches. It stops
where the notebook that waits for it is interrupted. One that cannot write may end with an error
that says so, and goes on from its checkpoint. A calibration or a verification gives its result, or
where a process was lost an error of the workbench. After each a short run ends as ever. Nothing
takes longer than `LIMIT_S`; and once the cluster has ended there is no process and no part of a
file left.
"""

import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.faults.places import HOUR_S, Place, can_starve, place
from tests.faults.table import PLACES, Fault
from workbench.bench.recovery import (
    CLOSE,
    LOOK_S,
    RANKS,
    attached_again,
    come_to,
    losses_of,
    pid_of,
    small_experiment,
)
from workbench.client.cluster import Cluster
from workbench.client.run.run import Run
from workbench.plan.plans.plan import Plan
from workbench.store.errors import ClusterError, RunError
from workbench.store.process import ProcessIdentity
from workbench.train.checkpoint.checkpoint import latest

# What a run's error says that could not write.
SAID = {
    "full": ("No space left",),
    "unwritable": ("Operation not permitted", "Permission denied"),
    "cut": ("Input/output error", "Transport endpoint is not connected"),
}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}
ENGINES = 3
# An interrupt of these reaches a rank, which ends.
OF_RANKS = ("engine", "relay", "agent")
# A call that lost a rank is not made again: whoever waits for it gets an error.
ENDS = ("kill", "down for 60 s", "gone", "full", "cut")
STOPPED_S = 3.0
LIMIT_S = 120.0
TIMEOUT_S = 60.0
FOLLOW = "import sys; from tests.faults.matrix import follow; follow(sys.argv[1])"


class Matrix:
    """A cluster, and what it stands on."""

    def __init__(self, place: Place) -> None:
        self.place, self.experiment = place, small_experiment()
        self.other = Plan.hybrid(self.experiment.plan.graph, RANKS)
        self.chance = random.Random(0)
        self.cluster = self._start()
        try:
            self.straight = losses(self.cluster.train(self.experiment))
        except BaseException:
            self.cluster.stop()
            raise

    def suffer(self, fault: Fault) -> None:
        """One fault, and what is promised; another cluster where this one is broken."""
        if fault.process == "disk" and self.place.disk is None:
            pytest.skip("no disk can be mounted here")
        if fault.how == "out of memory" and not can_starve():
            pytest.skip("the memory of processes cannot be limited here")
        broken = True
        try:
            self._come(fault)
            assert losses(self.cluster.train(self.experiment)) == self.straight, "the next run"
            broken = fault.costs_a_host
        finally:
            if broken:
                with suppress(ClusterError):
                    self.cluster.stop()
                if self.place.hosts is not None:
                    self.place.renew_hosts()
                self.cluster = self._start()
            for folder in self.place.directory.glob("2*"):  # by their dates: a disk is soon full
                shutil.rmtree(folder, ignore_errors=True)

    def _start(self) -> Cluster:
        directory, profile = self.place.directory, self.place.profile
        return Cluster(ENGINES, directory=directory, profile=profile, timeout=TIMEOUT_S)

    def _come(self, fault: Fault) -> None:
        if fault.process == "notebook":
            self._of_notebook(fault)
        elif fault.moment in ("calibrate", "verify"):
            self._of_call(fault)
        elif fault.moment == "stop":
            self._of_stop(fault)
        else:
            self._of_run(fault)

    def _of_run(self, fault: Fault) -> None:
        """A run, or several of a sweep, at a moment between start and end."""
        if fault.moment == "sweep":
            other = self.experiment.replace(seed=1)
            straight = [self.straight, losses(self.cluster.train(other))]
            runs = [*self.cluster.jobs.sweep(self.experiment, seed=range(2))]
        else:
            runs, straight = [self.cluster.train(self.experiment)], [self.straight]
        self._come_to(runs[0], fault.moment)
        self._hit(fault, runs[0])
        if fault.moment == "attach":
            Cluster.attach(self.cluster.folder)
        # Another plan adds up in another order.
        close = CLOSE if fault.moment == "re-cut" else 0.0
        for run, expected in zip([self._now(run) for run in runs], straight, strict=True):
            try:
                assert losses(run) == pytest.approx(expected, rel=close, abs=0.0)
            except RunError as error:
                self._goes_on(fault, run, error, expected, close)

    def _goes_on(
        self, fault: Fault, run: Run, error: RunError, straight: list[float], close: float
    ) -> None:
        """A run that could not write, and said so, goes on once it can."""
        if not any(words in str(error) for words in SAID.get(fault.how, ())):
            raise error
        if (newest := latest(run.directory)) is not None and not self._has_all(newest):
            rest = losses(self.cluster.train(run.experiment, resume=run))
            expected = straight[len(straight) - len(rest) :]
            assert rest == pytest.approx(expected, rel=close, abs=0.0)

    def _has_all(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is that of the last step, so that there is nothing to go on with."""
        return checkpoint.name == f"step-{self.experiment.steps:06}"

    def _of_stop(self, fault: Fault) -> None:
        """A run that is asked to stop, and gone on from."""
        run = self.cluster.train(self.experiment)
        self._come_to(run, "step")
        run.stop()
        self._hit(fault, run)
        run = self._now(run)
        try:
            first = losses(run)
        except RunError as error:
            self._goes_on(fault, run, error, self.straight, 0.0)
            return
        if run.state == "finished":  # it was, before anybody could tell it
            assert first == self.straight
            return
        rest = losses(self.cluster.train(self.experiment, resume=run))
        assert [*first[: len(self.straight) - len(rest)], *rest] == self.straight

    def _of_notebook(self, fault: Fault) -> None:
        """A run that another process has begun and follows."""
        command = [sys.executable, "-c", FOLLOW, str(self.cluster.folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as notebook:
            assert notebook.stdout is not None
            run = self.cluster.jobs[int(notebook.stdout.readline())]
            self._come_to(run, fault.moment)
            send(notebook.pid, fault.how)
            found = losses(run)
            if fault.how == "interrupt":  # which asks the run to stop
                assert run.state == "stopped"
            assert found == self.straight[: len(found) if fault.how == "interrupt" else None]
            assert (notebook.wait(LIMIT_S) == 0) == (fault.how == "stop")

    def _of_call(self, fault: Fault) -> None:
        """A calibration, or a verification."""
        plan, answers = self.experiment.plan, list[object]()

        def call() -> None:
            try:
                if fault.moment == "verify":
                    answers.append(self.cluster.verify(plan).exact)
                else:
                    answers.append(self.cluster.calibrate(plan, within_s=2.0, keep=False))
            except Exception as error:
                answers.append(error)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        time.sleep(0.1 + 0.7 * self.chance.random())
        self._hit(fault, None)
        thread.join(LIMIT_S)
        assert answers, f"{fault.moment} gives no answer"
        if fault.process == "supervisor" and fault.how == "kill":
            self.cluster = attached_again(self.cluster, LIMIT_S)
        if isinstance(answers[0], Exception):
            lost = fault.process in OF_RANKS and fault.how == "interrupt"
            assert fault.how in ENDS or lost, answers[0]
        else:
            assert answers[0] is not False, "it is not exact"

    def _come_to(self, run: Run, moment: str) -> None:
        early = {"sweep": "start", "attach": "step"}
        came = come_to(run, early.get(moment, moment), self.chance, self.other, LIMIT_S)
        assert came, "the run had ended before its moment"

    def _hit(self, fault: Fault, run: Run | None) -> None:
        """Does it; a supervisor that was killed is waited for, and its cluster attached to."""
        if fault.process in PLACES:
            self._strike(fault, run)
            return
        deadline = time.monotonic() + LIMIT_S
        while (pid := self._pid(fault.process, run)) is None:
            assert time.monotonic() < deadline, f"there is no {fault.process}"
            time.sleep(LOOK_S)
        if fault.how == "out of memory":
            self.place.starve(pid)
            return
        send(pid, fault.how)
        if fault.process == "supervisor" and fault.how == "kill" and run is not None:
            self.cluster = attached_again(self.cluster, LIMIT_S)

    def _pid(self, process: str, run: Run | None) -> int | None:
        if process == "agent":
            return self.chance.choice(self.place.agents())
        return pid_of(self.cluster, "engine" if process == "relay" else process, run, self.chance)

    def _strike(self, fault: Fault, run: Run | None) -> None:
        """Does it to what the cluster stands on."""
        host = self.chance.choice(run.engines[:RANKS] if run and run.engines else (0,))
        strikes: dict[str, Callable[[], object]] = {
            "full": lambda: self.place.fill(STOPPED_S),
            "frozen": lambda: self.place.freeze(STOPPED_S),
            "unwritable": lambda: self.place.forbid(run.directory, STOPPED_S),
            "damaged": lambda: self.place.damage(run.directory),
            "stalled": lambda: self.place.stall(STOPPED_S),
            "cut": lambda: self.place.network.cut(),
            "forward": lambda: self.place.jump(HOUR_S),
            "back": lambda: self.place.jump(-HOUR_S),
            "down for 2 s": lambda: self.place.unplug(host, 2.0),
            "down for 60 s": lambda: self.place.unplug(host, 60.0),
            "gone": lambda: self.place.vanish(host),
        }
        strikes[fault.how]()
        if fault.how == "damaged":
            self._hit(Fault("engine", "kill", fault.moment), run)

    def _now(self, run: Run) -> Run:
        """The run, of the cluster that there is now."""
        assert run.id is not None
        return self.cluster.jobs[run.id]


def follow(folder: str) -> None:
    """Begins a run on a cluster, prints its number and waits for it, as a notebook does."""
    run = Cluster.attach(Path(folder)).train(small_experiment())
    print(run.id, flush=True)
    run.wait(600.0)


def losses(run: Run) -> list[float]:
    """The loss of each step of a run, which ends in time."""
    return losses_of(run.wait(LIMIT_S))


def send(pid: int, how: str) -> None:
    with suppress(ProcessLookupError):  # it has ended by itself
        process = ProcessIdentity.of(pid)
        process.send(SIGNALS[how])
        if how == "stop":
            time.sleep(STOPPED_S)
            process.send(signal.SIGCONT)


@contextmanager
def matrix(table: str) -> Iterator[Matrix]:
    """A cluster for the faults of a table; afterwards nothing of it is left behind."""
    with tempfile.TemporaryDirectory() as folder:
        with place(
            Path(folder), hosts=ENGINES if table == "hosts" else 0, network=table == "network"
        ) as at:
            one = Matrix(at)
            try:
                yield one
            finally:
                with suppress(ClusterError):
                    one.cluster.stop()
                left = [*Path(folder).rglob("*.tmp"), *Path(folder).rglob("*.part")]
        left += [
            process.info["cmdline"]
            for process in psutil.process_iter(["cmdline"])
            if any(folder in word for word in process.info["cmdline"] or ())
        ]
    assert not left, "left behind"
