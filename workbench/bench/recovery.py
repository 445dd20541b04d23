"""Kills, at random moments of real runs: whether all end as if nothing had been, and how soon.

Each round trains the same experiment once more and does one thing to it, at a moment that its seed
says: ends an engine (SIGKILL), stops one (SIGSTOP), or ends the job server. The final loss is held
against that of a run that nothing was done to.
"""

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workbench.bench.report import Cell, Figure, Report
from workbench.cluster.cluster import Cluster
from workbench.cluster.errors import RunError
from workbench.cluster.jobs.record import JobRecord
from workbench.cluster.jobs.store import Store
from workbench.cluster.run import Run
from workbench.cluster.server.__main__ import STORE
from workbench.cluster.server.lock import LOCK
from workbench.model.trace import trace
from workbench.plan.experiment import SGD, Experiment, Synthetic
from workbench.plan.plan import Plan

KINDS = ("engine SIGKILL", "engine SIGSTOP", "server SIGKILL")
CLOSE = 1e-6
END_S = 300.0
TICK_S = 0.005


def run(*, quick: bool) -> Report:
    """Kills 200 times on 4 engines that train VGG-11; `quick`: 3 times on 2, a smaller model."""
    world, rounds = (2, 3) if quick else (4, 200)
    model = "squeezenet1_1" if quick else "vgg11"
    graph = trace(model, input_shape=(3, 32, 32), num_classes=10)
    experiment = Experiment(
        plan=Plan.data_parallel(graph, world),
        data=Synthetic(),
        batch_size=16,
        optimizer=SGD(lr=0.001),
        steps=60,
        checkpoint_every=10,
        evaluate_every=None,
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        Cluster(world, directory=directory, timeout=60.0) as cluster,
    ):
        bench = _Bench(cluster, experiment, Store(cluster.folder / STORE))
        straight = bench.loss_of(cluster.train(experiment).wait(END_S))
        rows = [bench.round(seed, KINDS[seed % len(KINDS)], straight) for seed in range(rounds)]
    lost = [row for row in rows if row["kind"] != KINDS[2]]
    return Report(
        "recovery",
        tuple(rows),
        {
            "kills_survived": Figure.of([sum(bool(row["survived"]) for row in rows) / len(rows)]),
            "seconds_to_detect": Figure.of([float(row["detected in s"]) for row in lost]),
            "seconds_to_resume": Figure.of([float(row["resumed in s"]) for row in lost]),
            "steps_lost": Figure.of([float(row["steps lost"]) for row in lost]),
        },
        (
            f"survived: finished, with the final loss of a run that nothing was done to, to "
            f"{CLOSE:g}; a server that was killed has also to let the first attempt end.",
            "detected: until the server wrote down that a rank was lost, others interrupted; "
            "resumed: until the first step of the next attempt.",
        ),
    )


@dataclass(frozen=True)
class _Bench:
    cluster: Cluster
    experiment: Experiment
    store: Store

    def round(self, seed: int, kind: str, straight: float) -> dict[str, Cell]:
        """One run, to which one thing is done."""
        chance = random.Random(seed)
        run = self.cluster.train(self.experiment)
        job = self.store.jobs()[-1].id
        step = chance.randrange(self.experiment.steps - 10)
        record = self._until(job, lambda record: record.state == "running" and record.step >= step)
        time.sleep(chance.random() * 0.1)
        begun = time.monotonic()
        if kind == "server SIGKILL":
            os.kill(int((Path(self.cluster.folder) / LOCK).read_text()), signal.SIGKILL)
        else:
            number = signal.SIGKILL if kind == "engine SIGKILL" else signal.SIGSTOP
            os.kill(chance.choice(record.pids), number)
        found: dict[str, Cell] = {"seed": seed, "kind": kind, "at step": record.step}
        if kind == "server SIGKILL":
            found |= {"detected in s": 0.0, "resumed in s": 0.0, "steps lost": 0}
        else:
            after = self._until(job, lambda record: bool(record.attempts))
            found["detected in s"] = time.monotonic() - begun
            self._until(job, lambda record: record.attempt > 1 and record.state == "running")
            found["resumed in s"] = time.monotonic() - begun
            lost = after.attempts[0]
            resumed = self.store.job(job).checkpoint
            kept = int(Path(resumed).name.removeprefix("step-")) if resumed else 0
            found["steps lost"] = max(lost.step - kept, 0)
        try:
            loss = self.loss_of(run.wait(END_S))
        except (RunError, TimeoutError):
            return {**found, "attempts": self.store.job(job).attempt, "survived": 0}
        attempts = self.store.job(job).attempt
        is_same = abs(loss - straight) <= CLOSE and attempts == 1 + (kind != "server SIGKILL")
        return {**found, "attempts": attempts, "survived": int(is_same)}

    def loss_of(self, run: Run) -> float:
        """Of the last step."""
        return float(run.metrics["loss"].iloc[-1])

    def _until(self, job: int, holds: Callable[[JobRecord], bool]) -> JobRecord:
        """The job's record as soon as it is so, or the job has ended."""
        while not holds(record := self.store.job(job)) and not record.has_ended:
            time.sleep(TICK_S)
        return record
