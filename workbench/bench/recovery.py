"""Kills at random moments of real runs: whether all end as if undisturbed, and how soon.

Each kill hits a run of its own, at a moment that depends on its seed: an engine is killed (SIGKILL)
or stopped (SIGSTOP), or the job server is killed; while ranks compute or communicate, while a
checkpoint is written, while they change their plan, or while the job is being started. The final
loss is compared with that of an undisturbed run.

    kills        many small runs, two at a time on six engines
    cluster      the same of supervisor and controller, which all runs of a cluster need
    VGG-11       a few of VGG-11 on four engines, for the times
    checkpoints  the cost of checkpoints that are written beside the steps
    hiccups      pauses that are no faults

The cost of checkpoints is that of

    steps    | 10 with one running | 10 without | 10 with one running | 10 without ...

Both kinds of steps are of one run, in turns, so that other changes on a machine affect both. A
block's time is from the row of the step before it to its last step's: it contains the copy and the
wait for an earlier checkpoint, which are between two steps.

In hiccups ranks, links between hosts and disks stand still for 2 to 10 s while a run goes on, and
none may be taken for a fault. Ranks are on emulated hosts, one each, brought by SSH as to real
ones: whoever cuts a host's link cuts what ranks send each other, and what their host says of them.
Where emulated hosts cannot be made, ranks are on this host, and links do not stand still; disks do
where one can be mounted: the one of runs, checkpoints and the cluster's store. Ranks are stopped by
a signal that the cluster knows nothing of. `tests/faults` strikes every process, and what it stands
on, at every moment.
"""

import fcntl
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil
import torch
from torch import nn

from workbench.bench.harness.progress import Part, Progress
from workbench.bench.harness.report import Cell, Figure, Report, Row
from workbench.client.cluster import Cluster
from workbench.client.run.run import Run
from workbench.hosts.emulated.hosts import Hosts
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.experiment.metrics import Row as MeasuredRow
from workbench.plan.plans.plan import Plan
from workbench.server.attempt import attempt_folder
from workbench.store.errors import ClusterError, HostsError, RunError
from workbench.store.process import RENDEZVOUS, SERVER, SUPERVISOR, holder
from workbench.store.rank_files import WITHDRAWN, RankFiles
from workbench.store.record import AttemptRecord, JobRecord
from workbench.store.telemetry import RowReader

Moment = Literal["start", "step", "checkpoint", "re-cut"]
KINDS = ("engine SIGKILL", "engine SIGSTOP", "server SIGKILL")
OF_ALL = ("supervisor SIGKILL", "controller SIGKILL")  # which hit every run
MOMENTS: tuple[Moment, ...] = ("step", "checkpoint", "step", "re-cut", "start")
HELD = {"server": SERVER, "supervisor": SUPERVISOR, "rendezvous": RENDEZVOUS}
CLOSE = 1e-9  # after a resharding, since another plan adds up in another order

ENGINES, RANKS = 4, 2
AT_ONCE = 2  # small runs; others take their engines while those of the last ones are replaced
KILLS, KILLS_OF_ALL, HICCUPS, STEPS = 400, 100, 100, 160
BATCH = 10  # kills, after which there is a report
LARGE, LARGE_STEPS = 2, 48  # for each plan of VGG-11
PAIRS, BLOCK = 5, 10  # of blocks, and steps of each, for the cost of checkpoints
END_S, TIMEOUT_S, LOOK_S = 600.0, 60.0, 0.002
LEASE_S = 0.5
"""Of ranks that are stopped: what is measured is the way back, not the wait for them."""
SERVER_S = 5.0  # from one server's end until the next one is at work, at most


def run(progress: Progress, *, quick: bool) -> Iterator[Report]:
    """Kills 500 small runs and 4 of VGG-11, and 100 hiccups; `quick`: 5 small runs, 2 hiccups."""
    kills = _batches(KINDS, len(KINDS) if quick else KILLS)
    of_all = _batches(OF_ALL, len(OF_ALL) if quick else KILLS_OF_ALL)
    progress.begin(
        Part("kills", len(kills), 4 * len(kills[0])),
        Part("cluster", len(of_all), 7 * len(of_all[0])),
        *([] if quick else [Part("VGG-11", 2, 120), Part("checkpoints", 1, 180)]),
        Part("hiccups", 2 if quick else HICCUPS, 10),
    )
    results = _Results()
    for part, batches, at_once in (("kills", kills, AT_ONCE), ("cluster", of_all, 1)):
        if progress.wants(part):
            each = progress.each(part, batches)
            for rows in _survivors(each, 1 if quick else at_once):
                results.small += rows
                yield results.report()
    if any(map(progress.wants, ("VGG-11", "checkpoints"))):
        with _cluster(ENGINES) as cluster:
            for which in progress.each("VGG-11"):
                results.large += _large(cluster, which)
                yield results.report()
            for _ in progress.each("checkpoints"):
                results.costs += _checkpoint_costs(cluster)
                yield results.report()
    if progress.wants("hiccups"):
        with _paused(small_experiment()) as paused:
            for _ in progress.each("hiccups"):
                results.hiccups.append(_printed(paused.hiccup()))
                yield results.report()
            results.difference = paused.difference()
            yield results.report()


@dataclass
class _Results:
    """The rows of each part so far."""

    small: list[Row] = field(default_factory=list)
    large: list[Row] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    hiccups: list[Row] = field(default_factory=list)
    difference: float | None = None

    def report(self) -> Report:
        """The report of all results so far."""
        rows, figures = [*self.small, *self.large], dict[str, Figure]()
        if rows:
            figures |= _figures(rows, self.large or self.small)
        if self.costs:
            figures["checkpoint_cost"] = Figure.of(self.costs)
        if self.hiccups:
            lost = float(self.hiccups[-1]["attempts lost"])
            figures["hiccups_lost"] = Figure.of([lost])
            after = [float(row["after s"]) for row in self.hiccups]
            figures["hiccups_go_on_after_s"] = Figure.of(after)
        if self.difference is not None:
            figures["hiccups_loss_difference"] = Figure.of([self.difference])
        notes = (
            "survived: finished, with the final loss of an undisturbed run, to the "
            f"last bit ({CLOSE:g} after a re-cut), and no attempt but after one that lost an "
            "engine which was killed here, or all of them with supervisor or controller.",
            "detected: until the job server gave the attempt up and interrupted the other ranks; "
            "ended: until it knew how all had ended; begun: until the next attempt had a rank; "
            "resumed: until that attempt's first step was done; of VGG-11.",
            "seconds_to_detect: of those in which no other kill had just ended the server, too.",
            "steps_lost: checkpoints are written every 10 steps, beside the steps that follow.",
            f"checkpoint_cost: what one every {BLOCK} steps of VGG-11, data parallel,"
            " adds to their time, as a part of it; steps with and without in turns, in one run.",
            "hiccups: a rank, a link or a disk stands still for 2 to 10 s; lost are attempts "
            "that were given up, and the loss is compared in every step with an undisturbed run's.",
        )
        return Report("recovery", (*rows, *self.hiccups), figures, notes, engines=ENGINES)


def _figures(rows: list[Row], timed: list[Row]) -> dict[str, Figure]:
    figures = {
        "kills_survived": Figure.of([sum(bool(row["survived"]) for row in rows) / len(rows)]),
        "hangs": Figure.of([float(sum(row["ended"] == "hangs" for row in rows))]),
        "lost": Figure.of([float(sum(row["ended"] not in ("finished", "hangs") for row in rows))]),
        "twice": Figure.of([float(sum(bool(row["more than once"]) for row in rows))]),
    }
    watched = [row for row in rows if row["server there"] == 1]
    columns = {
        "loss_difference": ("loss differs by", rows),
        "seconds_to_detect": ("detected in s", watched),
        "seconds_to_resume": ("resumed in s", timed),
        "steps_lost": ("steps lost", rows),
    }
    for kind in KINDS[:2]:
        own = [row for row in watched if row["kind"] == kind]
        columns[f"seconds_to_detect_{kind.split()[1]}"] = ("detected in s", own)
    for name, (column, some) in columns.items():
        values = [float(row[column]) for row in some if row[column] != ""]
        figures |= {name: Figure.of(values)} if values else {}
    return figures


@dataclass(frozen=True)
class Kill:
    """A kill: the seed of the moment and of the rank, the kind, and the moment."""

    seed: int
    kind: str
    moment: Moment

    @classmethod
    def of(cls, seed: int, kinds: Sequence[str]) -> "Kill":
        """The kill of a seed; every kind comes at every moment."""
        return cls(seed, kinds[seed % len(kinds)], MOMENTS[seed // len(kinds) % len(MOMENTS)])


def _batches(kinds: Sequence[str], count: int) -> list[list[Kill]]:
    kills = [Kill.of(seed, kinds) for seed in range(count)]
    return [kills[first : first + BATCH] for first in range(0, count, BATCH)]


@dataclass
class Target:
    """An experiment that is run repeatedly on one cluster, and resharded to another plan.

    The cluster is attached to anew once its supervisor was killed. `killed` has the process ids of
    engines that were killed or stopped here, `ended_servers` the times (epoch) of servers' kills.
    """

    cluster: Cluster
    experiment: Experiment
    other: Plan
    killed: set[int] = field(default_factory=set)
    ended_servers: list[float] = field(default_factory=list)

    def straight(self) -> float:
        """The final loss of a run without a kill."""
        return _last_loss(self.cluster.train(self.experiment).wait(END_S))

    def survive(self, kill: Kill, straight: float) -> dict[str, Cell]:
        """Runs the experiment with a kill; the outcome, against the loss without, as a row."""
        run = self.cluster.train(self.experiment)
        job = run.id
        assert job is not None
        come_to(run, kill.moment, random.Random(kill.seed), self.other)
        pid, at = self._do(kill, run)
        if kill.kind == "supervisor SIGKILL":
            self.cluster = attached_again(self.cluster, END_S)
            run = self.cluster.jobs[job]
        ended, difference = True, math.nan
        try:
            difference = abs(_last_loss(run.wait(END_S)) - straight)
        except TimeoutError:
            ended = False
            run.stop()
        except (RunError, ClusterError):
            pass  # the record says how it ended
        last = self.cluster.link.store.job(job)
        lost = sum(self.was_killed(attempt) for attempt in last.attempts)
        # With its supervisor or controller all engines of a cluster end, those of one attempt.
        again = max(last.attempt - 1 - (1 if kill.kind in OF_ALL else lost), 0)
        close = difference <= (CLOSE if kill.moment == "re-cut" else 0.0)
        survived = last.state == "finished" and close and not again
        row: dict[str, Cell] = {
            "seed": kill.seed,
            "kind": kill.kind,
            "moment": kill.moment,
            "ended": last.state if ended else "hangs",
            "attempts": last.attempt,
            "more than once": again,
            "loss differs by": "" if math.isnan(difference) else difference,
            "survived": int(survived),
            "why not": "" if survived else _reasons(last),
            **self._times(last, pid, at),
        }
        shutil.rmtree(run.directory, ignore_errors=True)
        return row

    def was_killed(self, attempt: AttemptRecord) -> bool:
        """Whether an attempt was lost with an engine that was killed here, not by itself."""
        return any(_lost_with(attempt, pid) for pid in self.killed)

    def _do(self, kill: Kill, run: Run) -> tuple[int, float]:
        """Kills; (the process id, the time in seconds since the epoch)."""
        chance, (process, name) = random.Random(-kill.seed), kill.kind.split()
        while True:
            pid = pid_of(self.cluster, process, run, chance)
            if pid is not None:
                at = time.time()
                if process == "engine":
                    self.killed.add(pid)
                with suppress(ProcessLookupError):  # another kill was before this one
                    os.kill(pid, signal.Signals[name])
                    if process == "server":
                        self.ended_servers.append(at)
                    return pid, at
            time.sleep(LOOK_S)  # the one after the last kill is coming

    def _times(self, record: JobRecord, pid: int, at: float) -> dict[str, Cell]:
        """The times of a run that lost an attempt: until that was noticed, and until it went on."""
        names = (
            *("server there", "detected in s", "ranks ended in s"),
            *("begun in s", "resumed in s", "steps lost"),
        )
        over = next((n for n, each in enumerate(record.attempts) if _lost_with(each, pid)), None)
        if over is None or over + 1 == len(record.attempts):
            return dict.fromkeys(names, "")
        lost, following = record.attempts[over : over + 2]
        known = (attempt_folder(record.directory, lost.number) / WITHDRAWN).stat().st_mtime
        again = RowReader(RankFiles(attempt_folder(record.directory, following.number), 0)).read(1)
        alone = not any(at - SERVER_S < ended < known for ended in self.ended_servers)
        values: tuple[Cell, ...] = (
            int(alone),
            known - at,
            lost.ended_at - at,
            following.started_at - at,
            again[0]["time"] - at if again else "",
            max(lost.step - following.resumed, 0),
        )
        return dict(zip(names, values, strict=True))


def come_to(
    run: Run, moment: str, chance: random.Random, other: Plan, limit_s: float = END_S
) -> bool:
    """Waits for a moment of a run, which is resharded to the other plan for a "re-cut".

    Returns:
        Whether it came; not if the run ended before.

    Raises:
        TimeoutError: it did not come.
    """
    if moment == "start":
        time.sleep(0.4 * chance.random())
        return True
    steps = run.experiment.steps
    step = chance.randrange(steps // 4, steps // 2)
    _until(run, lambda: any(row["step"] >= step for row in run.rows[-1:]), limit_s)
    if moment == "checkpoint":
        _until(run, lambda: any(run.directory.glob("step-*.tmp")), limit_s)
        return not run.is_done
    if moment == "re-cut":
        with suppress(ClusterError):  # it has ended
            run.replan(other)
    time.sleep(0.1 * chance.random())
    return not run.is_done


def _until(run: Run, holds: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not holds() and not run.is_done:
        if time.monotonic() > deadline:
            raise TimeoutError("the run does not come to its moment")
        time.sleep(LOOK_S)


def pid_of(cluster: Cluster, process: str, run: Run | None, chance: random.Random) -> int | None:
    """The id of a process of a cluster; None while there is none.

    An engine is one of the run's, or one that it may get; of a measurement, which is no run, one
    that is busy.
    """
    if process == "engine":
        store = cluster.link.store
        pids = [] if run is None or run.id is None else list(store.job(run.id).pids)
        if not pids:
            pids = [
                each.pid
                for each in store.engines()
                if each.pid and not each.is_assistant
                if (each.state == "busy" if run is None else each.job in (None, run.id))
            ]
        return chance.choice(pids) if pids else None
    supervisor = holder(cluster.folder / SUPERVISOR)
    if process == "controller":
        with suppress(psutil.Error):
            for child in [] if supervisor is None else psutil.Process(supervisor.pid).children():
                if "ipyparallel.controller" in child.cmdline():
                    return child.pid
        return None
    found = holder(cluster.folder / HELD[process])
    return None if found is None else found.pid


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


def _last_loss(run: Run) -> float:
    return float(run.metrics["loss"].iloc[-1])


def _reasons(record: JobRecord) -> str:
    """How a job, and its attempts, ended."""
    every = (record.reason, *(attempt.reason for attempt in record.attempts))
    return " | ".join(reason.replace("\n", " ")[:200] for reason in every if reason)


def _lost_with(attempt: AttemptRecord, pid: int) -> bool:
    return attempt.is_lost and f"(pid {pid})" in attempt.reason


def _survivors(batches: Iterable[Sequence[Kill]], at_once: int) -> Iterator[list[Row]]:
    """The outcomes of one small run for each kill of a batch, so many at a time."""
    engines = (2 * at_once - 1) * RANKS
    with _cluster(engines) as cluster, ThreadPoolExecutor(at_once) as side_by_side:
        experiment = small_experiment()
        small = Target(cluster, experiment, Plan.hybrid(experiment.plan.graph, RANKS))
        straight = small.straight()

        def survive(kill: Kill) -> Row:
            return _printed(small.survive(kill, straight))

        for kills in batches:
            yield list(side_by_side.map(survive, kills))


@contextmanager
def _cluster(engines: int) -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory() as directory,
        Cluster(engines, directory=directory, timeout=TIMEOUT_S, lease=LEASE_S) as cluster,
    ):
        yield cluster


def small_experiment() -> Experiment:
    """A small model on two ranks, the same in every process."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 16 * 16, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    plan = Plan.data_parallel(trace(net, input_shape=(3, 16, 16)), RANKS)
    return _experiment(plan, "fp64", STEPS)


def _experiment(plan: Plan, precision: Literal["fp32", "fp64"], steps: int) -> Experiment:
    return Experiment(
        plan=plan,
        data=Synthetic(),
        batch_size=16,
        optimizer=SGD(lr=0.001, momentum=0.9),
        steps=steps,
        precision=precision,
        checkpoint_every=10,
        evaluate_every=None,
    )


def _large(cluster: Cluster, which: int) -> Iterator[Row]:
    """Kills of VGG-11 under one of two plans, each once all engines are there, the spare too."""
    graph = trace("vgg11", input_shape=(3, 32, 32), num_classes=10)
    plans = {
        "data parallel": Plan.data_parallel(graph, ENGINES),
        "hybrid": Plan.hybrid(graph, ENGINES),
    }
    (name, plan), other = list(plans.items())[which], list(plans.values())[1 - which]
    target = Target(cluster, _experiment(plan, "fp32", LARGE_STEPS), other)
    straight, store = target.straight(), cluster.link.store
    for seed in range(LARGE):
        while any(engine.state not in ("idle", "busy") for engine in store.engines()):
            time.sleep(LOOK_S)
        row = target.survive(Kill(seed, KINDS[seed % 2], "step"), straight)
        yield _printed({**row, "VGG-11": name})


def _checkpoint_costs(cluster: Cluster) -> list[float]:
    """The relative increase of steps' time by a checkpoint every `BLOCK` steps, for each pair."""
    graph = trace("vgg11", input_shape=(3, 32, 32), num_classes=10)
    steps = (2 * PAIRS + 2) * BLOCK  # the first two blocks warm up
    experiment = _experiment(Plan.data_parallel(graph, ENGINES), "fp32", steps)
    run = cluster.train(experiment.replace(checkpoint_every=2 * BLOCK))
    return costs_in(run.wait(END_S).rows)


def costs_in(rows: Sequence[MeasuredRow]) -> list[float]:
    """The relative increases in the rows of a run that was saved every 2 `BLOCK` steps."""
    times = [row["time"] for row in sorted(rows, key=lambda row: row["step"]) if row["rank"] == 0]
    costs = []
    for start in range(2 * BLOCK - 1, len(times) - 2 * BLOCK, 2 * BLOCK):
        begun, between, end = (times[start + n * BLOCK] for n in range(3))
        costs.append((between - begun) / (end - between) - 1)
    return costs


def _printed(row: Row) -> Row:
    """The row, which is printed as it comes, since all of them take long."""
    print(", ".join(f"{name}: {value}" for name, value in row.items()), file=sys.stderr, flush=True)
    return row


DISK_MIB = 4096  # sparse: what is not written takes no room
FREEZE, THAW = 0xC0045877, 0xC0045878  # FIFREEZE and FITHAW of linux/fs.h


class Disk:
    """An ext4 file system in a file, mounted at `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def freeze(self) -> None:
        """Whoever writes waits until `thaw`, and cannot be interrupted or killed meanwhile."""
        self._request(FREEZE)

    def thaw(self) -> None:
        """Lets them go on."""
        with suppress(OSError):  # it was not frozen
            self._request(THAW)

    def _request(self, number: int) -> None:
        folder = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, number, 0)
        finally:
            os.close(folder)


@contextmanager
def mounted_disk(folder: Path) -> Iterator[Disk | None]:
    """A disk that is mounted in a folder; None where this process may not mount one."""
    image, root = folder / "disk.img", folder / "disk"
    root.mkdir()
    try:
        with image.open("wb") as file:
            file.truncate(DISK_MIB << 20)
        as_root("mkfs.ext4", "-q", image)
        as_root("mount", "-o", "loop", image, root)
    except (OSError, subprocess.CalledProcessError):
        yield None
        return
    disk = Disk(root)
    try:
        yield disk
    finally:
        disk.thaw()
        as_root("umount", "--lazy", root)  # a process that was killed may still have files open


def as_root(*command: object) -> None:
    """Runs a command, which may lie where few people's shells look."""
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    words = list(map(str, command))
    subprocess.run(words, check=True, env=environment, stderr=subprocess.DEVNULL)


LEAST_S, MOST_S = 2.0, 10.0
GOES_ON_WITHIN_S = 60.0
MANY_STEPS = 1_000_000  # more than it makes


class _Paused:
    """A run that goes on while what it runs on is paused, again and again."""

    def __init__(
        self, cluster: Cluster, hosts: Hosts | None, disk: Disk | None, experiment: Experiment
    ) -> None:
        self._cluster, self._hosts, self._disk = cluster, hosts, disk
        self._rng = random.Random(0)
        self._experiment = experiment
        self._run = cluster.train(experiment.replace(steps=MANY_STEPS))
        self._comes_to(1)

    def hiccup(self) -> dict[str, Cell]:
        """One hiccup, and how the run went on, as a row."""
        may = {"rank": True, "link": self._hosts is not None, "disk": self._disk is not None}
        what = self._rng.choice([each for each, can in may.items() if can])
        which, seconds = self._rng.randrange(RANKS), self._rng.uniform(LEAST_S, MOST_S)
        pause, go_on = self._switches(what, which)
        pause()
        try:
            time.sleep(seconds)
        finally:
            go_on()
        began, done = time.monotonic(), self._step()
        goes_on = self._comes_to(done + 3)  # two were under way, perhaps
        assert self._run.id is not None
        lost = self._cluster.link.store.job(self._run.id).attempts
        return {
            "hiccup": what,
            "of": which,
            "s": round(seconds, 1),
            "goes on": "yes" if goes_on else "NO",
            "after s": round(time.monotonic() - began, 2),
            "attempts lost": len(lost),
            "why": lost[-1].reason.partition("\n")[0] if lost else "",
        }

    def difference(self) -> float:
        """Ends the run; the greatest difference of a step's loss from an undisturbed run's."""
        self._run.stop()
        losses = losses_of(self._run.wait(END_S))
        straight = self._cluster.train(self._experiment.replace(steps=len(losses))).wait(END_S)
        return max(abs(a - b) for a, b in zip(losses, losses_of(straight), strict=True))

    def _switches(self, what: str, which: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """What pauses a rank, a link or the disk, and what lets it go on."""
        hosts, disk = self._hosts, self._disk
        if what == "link" and hosts is not None:
            return lambda: hosts.disconnect(which), lambda: hosts.reconnect(which)
        if what == "disk" and disk is not None:
            return disk.freeze, disk.thaw
        process = self._cluster.link.process_of(self._run.engines[which])
        # The relay of an engine on another host hands this on; SIGSTOP would stop the relay.
        stop = signal.SIGSTOP if hosts is None else signal.SIGTSTP
        return lambda: process.send(stop), lambda: process.send(signal.SIGCONT)

    def _step(self) -> int:
        newest = self._run.rows.newest(RANKS)
        return min((int(row["step"]) for row in newest), default=-1)

    def _comes_to(self, step: int) -> bool:
        deadline = time.monotonic() + GOES_ON_WITHIN_S
        while self._step() < step:
            if self._run.is_done or time.monotonic() > deadline:
                return False
            time.sleep(10 * LOOK_S)
        return True


def losses_of(run: Run) -> list[float]:
    """The loss of each step of a run, in order."""
    losses = {int(row["step"]): row["loss"] for row in run.rows}
    return [losses[step] for step in sorted(losses)]


@contextmanager
def _paused(experiment: Experiment) -> Iterator[_Paused]:
    """A run of an experiment for two ranks, on emulated hosts where there can be some."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts, profile = None, None
        disk = stack.enter_context(mounted_disk(folder))  # before hosts, so that they see it
        if shutil.which("sshd", path="/usr/sbin:/usr/bin"):
            with suppress(HostsError):
                hosts = stack.enter_context(Hosts(RANKS))
        if hosts is not None:
            profile = str(hosts.ssh(folder / "profile"))
        directory = (folder if disk is None else disk.root) / "runs"
        cluster = stack.enter_context(
            Cluster(RANKS, profile=profile, directory=directory, timeout=TIMEOUT_S)
        )
        yield _Paused(cluster, hosts, disk, experiment)
