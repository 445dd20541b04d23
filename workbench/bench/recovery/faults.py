"""The fault matrix: every process of a cluster, and what it stands on, struck at many moments.

    engine (of a rank), job server, store where    killed (SIGKILL), stopped (SIGSTOP, and SIGCONT
    ranks meet, controller, supervisor,            after 3 s), interrupted (SIGINT)
    notebook; of other hosts agent and relay
    engine                                         out of memory
    disk of runs and store                         full, frozen or unwritable for 3 s; a checkpoint
                                                   damaged, and a rank killed
    network disk: a file system behind SFTP        stalled for 3 s; its connection cut
    clock                                          jumps by an hour, forward or back
    link of a host                                 down for 2 s and for 60 s
    host                                           gone, without a word

    moments     start of a job, step, checkpoint, re-cut, stop, sweep, attach, calibrate, verify

What is promised: a run ends with the losses of an undisturbed one, to the last bit (to 1e-9 after a
re-cut), in whatever attempt; after its supervisor was killed, once somebody attaches. It stops
where the notebook that waits for it is interrupted. One that cannot write may end with an error
that says so, and goes on from its checkpoint. A calibration or a verification gives its result, or
where a process was lost an error of the workbench. After each a short run ends as ever. Nothing
takes longer than `LIMIT_S`; and once the cluster has ended there is no process and no part of a
file left.
"""

import math
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
from typing import get_args

import psutil

from workbench.bench.recovery.around import HOUR_S, Around, around, can_starve
from workbench.bench.recovery.fault_table import Fault, How, Moment, Place, Process
from workbench.bench.recovery.kills import LOOK_S, attached_again, controller_of
from workbench.bench.report import Cell
from workbench.client.cluster import Cluster
from workbench.client.run.run import Run
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.plans.plan import Plan
from workbench.store.errors import ClusterError, RunError
from workbench.store.process import RENDEZVOUS, SERVER, SUPERVISOR, ProcessIdentity, holder
from workbench.train.checkpoint.checkpoint import latest

# What a run's error says that could not write.
SAID = {
    "full": ("No space left",),
    "unwritable": ("Operation not permitted", "Permission denied"),
    "cut": ("Input/output error", "Transport endpoint is not connected"),
}
SIGNALS: dict[How, signal.Signals] = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "interrupt": signal.SIGINT,
}
HELD = {"server": SERVER, "supervisor": SUPERVISOR, "rendezvous": RENDEZVOUS}
ENGINES, RANKS = 3, 2
# An interrupt of these reaches a rank, which ends.
OF_RANKS = ("engine", "relay", "agent")
STOPPED_S = 3.0
LIMIT_S = 120.0
TIMEOUT_S = 60.0


class Matrix:
    """A cluster to which faults happen, one after the other.

    Args:
        place: the disk, clock and hosts that its cluster stands on.
        experiment: the experiment that is trained, for two ranks.
        other: the plan that runs are resharded to.
    """

    def __init__(self, place: Around, experiment: Experiment, other: Plan) -> None:
        self._place, self._experiment, self._other = place, experiment, other
        self._chance = random.Random(0)
        self.cluster = self._start()
        try:
            self._straight = _losses(self.cluster.train(experiment), LIMIT_S)
        except BaseException:
            self.cluster.stop()
            raise

    def can(self, fault: Fault) -> bool:
        """Whether this process may do it: memory is limited, and disks are mounted, by root."""
        if fault.process == "disk":
            return self._place.disk is not None
        return fault.how != "out of memory" or can_starve()

    def suffer(self, fault: Fault) -> dict[str, Cell]:
        """One fault, what came of it, and whether that is what is promised, as a row."""
        began = time.monotonic()
        try:
            came = self._come(fault)
            if _losses(self.cluster.train(self._experiment), LIMIT_S) != self._straight:
                came += "; NO: the next run has other losses"
        except TimeoutError as error:
            came = f"NO: hangs: {error}"
            self._anew()
        except Exception as error:
            came = f"NO: {type(error).__name__}: {error}"
            self._anew()
        else:
            if fault.costs_a_host:
                self._anew()
        for folder in self._place.directory.glob("2*"):  # by their dates: a disk is soon full
            shutil.rmtree(folder, ignore_errors=True)
        return {
            "process": fault.process,
            "fault": fault.how,
            "moment": fault.moment,
            "came": came[:200],
            "kept": int("NO: " not in came),
            "s": round(time.monotonic() - began, 1),
        }

    def _come(self, fault: Fault) -> str:
        match fault.moment:
            case "calibrate" | "verify":
                return self._of_call(fault)
            case "stop":
                return self._of_stop(fault)
            case _:
                return self._of_run(fault)

    def _start(self) -> Cluster:
        place = self._place
        return Cluster(ENGINES, directory=place.directory, profile=place.profile, timeout=TIMEOUT_S)

    def _anew(self) -> None:
        """Another cluster, for what comes after one that is broken."""
        with suppress(ClusterError):
            self.cluster.stop()
        if self._place.hosts is not None:
            self._place.renew_hosts()
        self.cluster = self._start()

    def _of_run(self, fault: Fault) -> str:
        """A run, at a moment between its start and its end."""
        if fault.process == "notebook":
            return self._of_notebook(fault)
        if fault.moment == "sweep":
            other = self._experiment.replace(seed=1)
            losses = [self._straight, _losses(self.cluster.train(other), LIMIT_S)]
            runs = [*self.cluster.jobs.sweep(self._experiment, seed=range(2))]
        else:
            runs, losses = [self.cluster.train(self._experiment)], [self._straight]
        self._come_to(runs[0], fault.moment)
        self._hit(fault, runs[0])
        if fault.moment == "attach":
            Cluster.attach(self.cluster.folder)
        # Another plan adds up in another order.
        tolerance = 1e-9 if fault.moment == "re-cut" else 0.0
        found = [self._found(run) for run in runs]
        return "; ".join(
            self._ended_or_told(fault, *each, tolerance) for each in zip(found, losses, strict=True)
        )

    def _ended_or_told(
        self, fault: Fault, run: Run, straight: list[float], tolerance: float
    ) -> str:
        """How a run has ended; one that could not write goes on once it can."""
        try:
            return self._ended(run, straight, tolerance)
        except RunError as error:
            return self._told(fault, run, error, straight, tolerance)

    def _told(
        self, fault: Fault, run: Run, error: RunError, straight: list[float], tolerance: float
    ) -> str:
        """How a run goes on that could not write and said so.

        Raises:
            RunError: it ended for another reason.
        """
        if not any(words in str(error) for words in SAID.get(fault.how, ())):
            raise error
        told = str(error).splitlines()[0]
        if latest(run.directory) is None:
            return f"told: {told}"
        rest = self.cluster.train(run.experiment, resume=run)
        done = len(_losses(rest, LIMIT_S))
        return f"told, and {self._ended(rest, straight[len(straight) - done :], tolerance)}: {told}"

    def _of_stop(self, fault: Fault) -> str:
        """A run that is asked to stop, and gone on from."""
        run = self.cluster.train(self._experiment)
        self._come_to(run, "step")
        run.stop()
        self._hit(fault, run)
        run = self._found(run)
        try:
            run.wait(LIMIT_S)
        except RunError as error:
            return self._told(fault, run, error, self._straight, 0.0)
        if run.state == "finished":  # it was, before anybody could tell it
            return self._ended(run, self._straight, 0.0)
        rest = self.cluster.train(self._experiment, resume=run)
        first, then = _losses(run, LIMIT_S), _losses(rest, LIMIT_S)
        whole = [*first[: len(self._straight) - len(then)], *then]
        return "stopped, and went on" if whole == self._straight else "NO: other losses"

    def _of_notebook(self, fault: Fault) -> str:
        """A run that another process has begun and follows."""
        code = (
            "import sys; from workbench.bench.recovery import recovery as r; r.follow(sys.argv[1])"
        )
        command = [sys.executable, "-c", code, str(self.cluster.folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as notebook:
            assert notebook.stdout is not None
            run = self.cluster.jobs[int(notebook.stdout.readline())]
            self._come_to(run, fault.moment)
            _send(notebook.pid, fault.how)
            if fault.how == "interrupt":  # which asks the run to stop
                losses = _losses(run, LIMIT_S)
                done = self._straight[: len(losses)] if run.state == "stopped" else None
                ended = "stopped" if losses == done else f"NO: {run.state}"
            else:
                ended = self._ended(run, self._straight, 0.0)
            status = notebook.wait(LIMIT_S)
        return ended if (status == 0) == (fault.how == "stop") else f"NO: status {status}"

    def _of_call(self, fault: Fault) -> str:
        """A calibration, or a verification."""
        plan, answers = self._experiment.plan, list[object]()

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
        time.sleep(0.1 + 0.7 * self._chance.random())
        self._hit(fault, None)
        thread.join(LIMIT_S)
        if not answers:
            raise TimeoutError(f"{fault.moment} gives no answer")
        (answer,) = answers
        self._attached(fault)
        if isinstance(answer, Exception):
            # A call that lost a rank is not made again: whoever waits for it is told why.
            ends = ("kill", "down for 60 s", "gone", "full", "cut")
            lost = fault.how in ends or (fault.process in OF_RANKS and fault.how == "interrupt")
            return f"told: {answer}" if lost else f"NO: {answer}"
        return "NO: not exact" if answer is False else "a result"

    def _come_to(self, run: Run, moment: Moment) -> None:
        """Waits for a moment of a run, or its end."""
        if moment in ("start", "sweep"):
            time.sleep(0.3 * self._chance.random())
            return
        at = self._chance.randrange(self._experiment.steps // 4, self._experiment.steps // 2)
        _until(run, lambda: any(row["step"] >= at for row in run.rows[-1:]))
        if moment == "checkpoint":
            _until(run, lambda: any(run.directory.glob("step-*.tmp")))
        elif moment == "re-cut":
            with suppress(ClusterError):  # it has ended
                run.replan(self._other)
            time.sleep(0.05 * self._chance.random())

    def _hit(self, fault: Fault, run: Run | None) -> None:
        """Does it; a supervisor that was killed is waited for, and its cluster attached to."""
        if fault.process in get_args(Place):
            self._strike(fault, run)
            return
        deadline = time.monotonic() + LIMIT_S
        while (pid := self._pid(fault.process, run)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"there is no {fault.process}")
            time.sleep(LOOK_S)
        if fault.how == "out of memory":
            self._place.starve(pid)
            return
        _send(pid, fault.how)
        if fault.process == "supervisor" and fault.how == "kill" and run is not None:
            self._attached(fault)

    def _strike(self, fault: Fault, run: Run | None) -> None:
        """Does it to what the cluster stands on."""
        host = self._chance.choice(run.engines[:RANKS] if run and run.engines else (0,))
        match fault.how:
            case "full":
                self._place.fill(STOPPED_S)
            case "frozen":
                self._place.freeze(STOPPED_S)
            case "unwritable":
                assert run is not None
                self._place.forbid(run, STOPPED_S)
            case "damaged":
                assert run is not None
                self._place.damage(run)
                self._hit(Fault("engine", "kill", fault.moment), run)
            case "stalled" | "cut":
                assert self._place.network is not None
                if fault.how == "cut":
                    self._place.network.cut()
                else:
                    self._place.stall(STOPPED_S)
            case "forward" | "back":
                self._place.jump(HOUR_S if fault.how == "forward" else -HOUR_S)
            case "down for 2 s":
                self._place.unplug(host, 2.0)
            case "down for 60 s":
                self._place.unplug(host, 60.0)
            case "gone":
                self._place.vanish(host)

    def _attached(self, fault: Fault) -> None:
        """After the supervisor's end, attaches as another notebook would."""
        if fault.process == "supervisor" and fault.how == "kill":
            self.cluster = attached_again(self.cluster, LIMIT_S)

    def _found(self, run: Run) -> Run:
        """The run, of the cluster that there is now."""
        assert run.id is not None
        return self.cluster.jobs[run.id]

    def _ended(self, run: Run, straight: list[float], tolerance: float) -> str:
        """How a run has ended, held against an undisturbed one within a relative tolerance."""
        losses = _losses(run, LIMIT_S)
        same = len(losses) == len(straight) and all(
            math.isclose(*pair, rel_tol=tolerance) for pair in zip(losses, straight, strict=True)
        )
        attempts = len(self.cluster.link.store.job(run.id or 0).attempts)
        went = "went on" if attempts <= 1 else f"resumed, in attempt {attempts}"
        return went if same else f"NO: {went}, with other losses"

    def _pid(self, process: Process | Place, run: Run | None) -> int | None:
        if process == "agent":
            return self._chance.choice(self._place.agents())
        if process in HELD:
            found = holder(self.cluster.folder / HELD[process])
            return None if found is None else found.pid
        if process == "controller":
            return controller_of(self.cluster)
        store = self.cluster.link.store
        pids = [] if run is None or run.id is None else list(store.job(run.id).pids)
        if not pids:  # it has none yet, or it is a measurement, whose engines are busy
            engines = [one for one in store.engines() if not one.is_assistant and one.pid]
            busy = [one.pid for one in engines if one.pid and one.state == "busy"]
            pids = busy or [one.pid for one in engines if one.pid and run is not None]
        return self._chance.choice(pids) if pids else None


@contextmanager
def matrix(
    experiment: Experiment,
    other: Plan,
    left: list[str],
    num_hosts: int = 0,
    *,
    network: bool = False,
) -> Iterator[Matrix | None]:
    """A cluster for faults; None where there cannot be one.

    Args:
        experiment: the experiment that is trained, for two ranks.
        other: the plan that runs are resharded to.
        left: a list that takes the processes and files that are left behind.
        num_hosts: the number of emulated hosts that its engines are on; 0: this one.
        network: whether the folder of its runs comes over a network.
    """
    with tempfile.TemporaryDirectory() as folder:
        with around(Path(folder), num_hosts, network=network) as place:
            if place is None:
                yield None
                return
            one = Matrix(place, experiment, other)
            try:
                yield one
            finally:
                with suppress(ClusterError):
                    one.cluster.stop()
                left += _parts(Path(folder))
        left += _processes(Path(folder))


def _processes(folder: Path) -> list[str]:
    """The processes that are left behind; what ranks share has no name."""
    return [
        f"process {' '.join(process.info['cmdline'])}"
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in process.info["cmdline"] or ())
    ]


def _parts(folder: Path) -> list[str]:
    """The parts of files that are left behind."""
    parts = [*folder.rglob("*.tmp"), *folder.rglob("*.part")]
    return [f"file {path.relative_to(folder)}" for path in parts]


def _send(pid: int, how: How) -> None:
    with suppress(ProcessLookupError):  # it has ended by itself
        process = ProcessIdentity.of(pid)
        process.send(SIGNALS[how])
        if how == "stop":
            time.sleep(STOPPED_S)
            process.send(signal.SIGCONT)


def _until(run: Run, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds() and not run.is_done:
        if time.monotonic() > deadline:
            raise TimeoutError("the run does not come to its moment")
        time.sleep(LOOK_S)
    if run.is_done:
        raise RuntimeError("the run had ended before its moment")


def _losses(run: Run, limit_s: float) -> list[float]:
    """The loss of each step of a run, which ends within a limit."""
    found = {int(row["step"]): row["loss"] for row in run.wait(limit_s).rows}
    return [found[step] for step in sorted(found)]
