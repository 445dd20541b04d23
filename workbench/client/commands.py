"""What the commands of `python -m workbench` do, and a run as one line of a terminal."""

import sys
import time
from argparse import Namespace
from contextlib import closing
from pathlib import Path
from typing import TextIO

from workbench.client.cluster import Cluster
from workbench.client.jobs import lines
from workbench.client.run import view
from workbench.client.run.run import Run
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.question import experiment_of, required_plan
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan
from workbench.predict.prediction import predict as predicted
from workbench.program.step import program as programmed
from workbench.store import registry
from workbench.store.cluster_store import open_store
from workbench.store.errors import ClusterError
from workbench.supervisor import supervisor_of


def run(options: Namespace) -> int:
    """Runs an experiment; an interrupt stops it after its current step."""
    experiment = Experiment.load(options.experiment, trust=options.trust)
    cluster = _cluster(options, experiment)
    started = cluster.train(experiment, resume=options.resume, priority=options.priority)
    print(f"job {started.id} of cluster {cluster.name}, in {started.directory}", file=sys.stderr)
    if options.detach:
        return 0
    try:
        Progress(started).follow()
    except KeyboardInterrupt:
        print("\nstopping after this step; a checkpoint is left", file=sys.stderr)
        started.stop()
        Progress(started).follow()
    return _told(started)


def jobs(options: Namespace) -> int:
    """Prints the jobs of one cluster, or of all that are known here."""
    if options.cluster is not None:
        folders = [registry.find(options.cluster)]
    else:
        folders = [folder for _name, folder in registry.known()]
    if not folders:
        print("no cluster is known here; python -m workbench run starts one")
    for folder in folders:
        kept = (
            "" if supervisor_of(folder) is not None else ", which has ended; attach starts it again"
        )
        print(f"cluster {registry.name_of(folder)} in {folder.parent}{kept}")
        try:
            with closing(open_store(folder, read_only=True)) as store:
                print(lines(job for job in store.jobs() if job.kind == "train"))
        except ClusterError as error:  # one of several
            print(f"its jobs cannot be read: {error}")
    return 0


def attach(options: Namespace) -> int:
    """Follows jobs until they end; an interrupt leaves them alone."""
    cluster = Cluster.attach(options.cluster)
    if options.job is not None:
        followed = [cluster.jobs[options.job]]
    else:
        followed = [job for job in cluster.jobs if not job.is_done]
    if not followed:
        print(f"no job goes on in {cluster.name}")
    try:
        for job in followed:
            print(f"job {job.id}: {job.experiment!r}", file=sys.stderr)
            Progress(job).follow()
    except KeyboardInterrupt:
        print("\nleft; it goes on", file=sys.stderr)
        return 0
    return max((_told(job) for job in followed), default=0)


def _cluster(options: Namespace, experiment: Experiment) -> Cluster:
    size = options.engines or experiment.plan.world_size
    if options.cluster is None:
        return Cluster(size, directory=options.directory)
    if options.cluster in dict(registry.known()):
        return Cluster.attach(options.cluster)
    return Cluster(size, directory=options.directory, name=options.cluster)


def _told(run: Run) -> int:
    """Says how a run ended; the exit status that goes with it."""
    for note in run.notes:
        print(note, file=sys.stderr)
    if run.error is not None:
        raise ClusterError(str(run.error)) from run.error
    print(f"{run.state}: {run.directory}")
    return 0


def predict(options: Namespace) -> int:
    """Prints memory and traffic, and with a machine the time, of a step."""
    experiment = _experiment(options)
    machine = None if options.machine is None else _machine(options.machine)
    print(predicted(experiment.plan, machine, experiment))
    return 0


def program(options: Namespace) -> int:
    """Prints what ranks execute in one step, an instruction on each line.

    Raises:
        ValueError: the plan has no such rank.
    """
    found = programmed(_experiment(options))
    if options.rank is None:
        print(found)
        return 0
    try:
        print(found.of(options.rank))
    except IndexError as error:
        raise ValueError(str(error)) from None
    return 0


def verify(options: Namespace) -> int:
    """Prints how far the split model is from the unsplit one; fails where it is not exact."""
    plan = Plan.load(options.plan, trust=options.trust)
    with Cluster(plan.world_size, directory=options.directory) as cluster:
        found = cluster.verify(plan, steps=options.steps, precision=options.precision)
    print(found)
    return 0 if found.exact else 1


def _experiment(options: Namespace) -> Experiment:
    """What a file holds, with what is asked for; a plan alone is given a usual step."""
    text = options.plan.read_text()
    kind = Experiment if "\n[experiment]" in f"\n{text}" else Plan
    held = kind.from_toml(text, trust=options.trust)
    plan = required_plan("workbench", held)
    asked = {"batch_size": options.batch_size, "precision": options.precision}
    return experiment_of("workbench", held, plan, None, **asked)


def _machine(name: str) -> Machine:
    return Machine.load(name) if Path(name).exists() else Machine.preset(name)


TICK_S = 0.1
WIDTH = 28
_PLAIN_EVERY = 0.1  # of all steps, where no line can be written over


class Progress:
    """Writes where a run stands, over and over: on a terminal in place, elsewhere line by line.

    Args:
        stream: the stream to write to; None: standard error.
    """

    def __init__(self, run: Run, stream: TextIO | None = None) -> None:
        self.run, self.stream = run, sys.stderr if stream is None else stream
        self._steps: dict[int, int] = {}  # of each rank: those done
        self._read = 0
        self._said: tuple[str, int] | None = None
        self._began: tuple[float, int] | None = None
        self._in_place = self.stream.isatty()
        self._longest = 0

    def follow(self) -> None:
        """Returns when the run has ended; raises nothing of its own."""
        while not self.run.join(TICK_S):
            self.show()
        self.show()
        if self._in_place:
            self.stream.write("\n")

    def show(self) -> None:
        """Writes one line, if there is news."""
        self._take()
        done, steps = self.done, self.run.experiment.steps
        said = (self.run.state, done if self._in_place else int(done / (steps * _PLAIN_EVERY)))
        if said == self._said:
            return
        self._said, text = said, self.line()
        if self._in_place:
            self._longest = max(self._longest, len(text))
            self.stream.write(f"\r{text:<{self._longest}}")
        else:
            self.stream.write(f"{text}\n")
        self.stream.flush()

    @property
    def done(self) -> int:
        """Steps that every rank has reported."""
        complete = len(self._steps) == self.run.experiment.plan.world_size
        return min(self._steps.values()) if complete else 0

    def line(self) -> str:
        """The line."""
        run, done, steps = self.run, self.done, self.run.experiment.steps
        filled = WIDTH * done // max(1, steps)
        told = [f"[{'#' * filled}{'.' * (WIDTH - filled)}] {done} of {steps}", run.state]
        if run.reason:
            told.append(run.reason)
        if last := run.rows.newest(1):
            told += [f"loss {last[0]['loss']:.4g}", f"{last[0]['samples_per_s']:.4g} samples/s"]
        if not run.is_done and (left := self._left_s(done)) is not None:
            told.append(f"{left:.0f} s left")
        told += view.figures(run.evaluation)
        return ", ".join(told)

    def _take(self) -> None:
        rows, self._read = self.run.rows.since(self._read)
        for row in rows:
            self._steps[int(row["rank"])] = int(row["step"]) + 1
        if self._began is None and self.done:
            self._began = (time.monotonic(), self.done)

    def _left_s(self, done: int) -> float | None:
        """Seconds to go, at the speed since we look."""
        if self._began is None or done <= self._began[1]:
            return None
        since, first = self._began
        return (time.monotonic() - since) / (done - first) * (self.run.experiment.steps - done)
