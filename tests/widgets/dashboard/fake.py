"""Runs without engines, which do what a test says."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from workbench.client.run.rows import Rows
from workbench.plan.experiment.metrics import Span
from workbench.predict.measured import Timeline
from workbench.store.errors import ClusterError
from workbench.store.record import EngineRecord, EventRecord
from workbench.train.run.requests import CarriedOut

MIB = 2**20


class FakeCluster:
    """Engines, one more than a run needs, and what was done to them."""

    def __init__(self, num_engines: int) -> None:
        engines = [
            EngineRecord(index=i, state="busy", memory_bytes=400 * MIB) for i in range(num_engines)
        ]
        self.done: list[tuple[Any, ...]] = []
        self.slowed: dict[int, float] = {}
        self.jobs: dict[int, FakeRun] = {}
        store = SimpleNamespace(engines=lambda: tuple(engines), job=self._job)
        self.link = SimpleNamespace(store=store, is_kept=True)

    def _job(self, number: int) -> Any:
        return SimpleNamespace(has_ended=number not in self.jobs)

    def kill(self, engine: int) -> None:
        self.done.append(("kill", engine))

    def pause(self, engine: int) -> None:
        self.done.append(("pause", engine))

    def unpause(self, engine: int) -> None:
        self.done.append(("unpause", engine))

    def slow(self, engine: int, factor: float) -> None:
        self.done.append(("slow", engine, factor))
        self.slowed = {engine: factor} if factor > 1 else {}


class FakeRun:
    """Keeps to `workbench.widgets.dashboard.runs.Run`; `feed` adds steps, `end` ends it."""

    def __init__(self, world_size: int = 4, steps: int = 80, experiment: Any = None) -> None:
        plain = SimpleNamespace(
            steps=steps,
            plan=SimpleNamespace(world_size=world_size),
            optimizer=SimpleNamespace(lr=0.1),
            trace_every=0,
        )
        self.experiment = experiment or plain
        self.id: int | None = 7
        self.state, self.reason = "starting", ""
        self.error: BaseException | None = None
        self.rows = Rows()
        self.evaluation: dict[str, float] = {}
        self.notes: list[str] = []
        self.stops = 0
        self.asked: list[tuple[Any, ...]] = []
        self.happened: list[EventRecord] = []
        self.cluster = FakeCluster(world_size + 1)
        self.engines = tuple(range(1, world_size + 1))
        self.traced: Timeline | None = None
        self.callbacks: list[Callable[[list[dict[str, float]]], None]] = []

    @property
    def is_stopping(self) -> bool:
        return self.stops > 0

    def subscribe(self, callback: Callable[[list[dict[str, float]]], None]) -> Callable[[], None]:
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback)

    def events(self, after: int = 0) -> list[EventRecord]:
        return [event for event in self.happened if event.id > after]

    def timeline(self, step: int | None = None) -> Timeline:
        if self.traced is None:
            raise ClusterError("no step of this run has been traced")
        return self.traced

    def stop(self) -> None:
        self.stops += 1

    def pause(self) -> None:
        self.asked.append(("pause",))
        self.state, self.reason = "paused", "paused"
        self.push([])

    def resume(self) -> None:
        self.asked.append(("resume",))
        self.state, self.reason = "running", ""
        self.push([])

    def set_lr(self, value: float) -> Any:
        self.asked.append(("lr", value))
        self.experiment.optimizer = SimpleNamespace(lr=value)
        return SimpleNamespace(wait=lambda _timeout: CarriedOut(57, before=0.1))

    def checkpoint_now(self) -> Any:
        self.asked.append(("checkpoint",))
        return SimpleNamespace(wait=lambda _timeout: CarriedOut(58, 0.25))

    def happen(self, text: str, level: Any = "info") -> None:
        """The job server notes something."""
        number = len(self.happened) + 1
        self.happened.append(EventRecord(id=number, time=1000.0, level=level, kind="x", text=text))
        self.push([])

    def feed(self, first: int, last: int, **values: float) -> None:
        """Steps first..last of every rank, like those of a real run unless values say else."""
        rows = [
            row(step, rank, **values)
            for step in range(first, last + 1)
            for rank in range(self.experiment.plan.world_size)
        ]
        self.state = "running"
        self.push(rows)

    def push(self, rows: list[dict[str, float]]) -> None:
        self.rows.extend(rows)
        for callback in list(self.callbacks):
            callback(rows)

    def end(
        self, state: str = "finished", error: BaseException | None = None, **evaluation: float
    ) -> None:
        self.error, self.evaluation, self.state = error, evaluation, state
        self.push([])


def row(step: int, rank: int, **values: float) -> dict[str, float]:
    wobble = math.sin(1.7 * step + rank)
    usual = {
        "step": step,
        "rank": rank,
        "time": 1000.0 + 0.2 * step + 0.001 * rank,
        "loss": 2.3 * math.exp(-step / 20) + 0.05 * (1 + math.sin(1.7 * step)),
        "samples_per_s": 640 + 30 * math.sin(2.1 * step),
        "compute_s": 0.14 + 0.01 * wobble,
        "communication_s": 0.04 + 0.004 * wobble,
        "wait_s": 0.02 - 0.01 * wobble,
        "received_bytes": 9 * MIB,
        "tensor_bytes": (133 + 5 * rank) * MIB,
        "weight_bytes": 40 * MIB,
        "optimizer_bytes": 40 * MIB,
        "staging_bytes": 6 * MIB,
        "peak_bytes": (160 + 6 * rank) * MIB,
        "rss_bytes": 400 * MIB,
        "gpu_bytes": 0,
        "accuracy": 1 - math.exp(-step / 25) if step % 20 == 19 else math.nan,
    }
    return {**usual, **values}


def traced(world_size: int, step: int = 9) -> Timeline:
    """A step of forward, backward and one all-reduce on each rank."""
    lanes = [
        (
            Span(rank, "compute", "forward", "conv", 0.0, 0.06 + 0.002 * rank),
            Span(rank, "compute", "backward", "conv", 0.07, 0.1),
            Span(
                rank,
                "communication",
                "collective",
                "gradients",
                0.1,
                0.05,
                "all_reduce",
                "step",
                MIB,
            ),
        )
        for rank in range(world_size)
    ]
    return Timeline(step, tuple(lanes), (0.2,) * world_size)
