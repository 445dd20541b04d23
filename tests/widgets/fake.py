"""A run without engines, which does what a test says."""

import math
from collections.abc import Callable
from types import SimpleNamespace

MIB = 2**20


class FakeRun:
    """Keeps to `workbench.widgets.status.Run`; `feed` adds steps, `end` ends it."""

    def __init__(self, world_size: int = 4, steps: int = 80) -> None:
        self.experiment = SimpleNamespace(steps=steps, plan=SimpleNamespace(world_size=world_size))
        self.state, self.reason = "starting", ""
        self.error: BaseException | None = None
        self.rows: list[dict[str, float]] = []
        self.evaluation: dict[str, float] = {}
        self.notes: list[str] = []
        self.stops = 0
        self.callbacks: list[Callable[[list[dict[str, float]]], None]] = []

    @property
    def is_stopping(self) -> bool:
        return self.stops > 0

    def subscribe(self, callback: Callable[[list[dict[str, float]]], None]) -> Callable[[], None]:
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback)

    def stop(self) -> None:
        self.stops += 1

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
        "tensor_bytes": (133 + 5 * rank) * MIB,
        "peak_bytes": (160 + 6 * rank) * MIB,
        "rss_bytes": 400 * MIB,
        "gpu_bytes": 0,
        "accuracy": 1 - math.exp(-step / 25) if step % 20 == 19 else math.nan,
    }
    return {**usual, **values}
