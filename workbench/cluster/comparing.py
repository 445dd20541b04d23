"""What was measured of a run, for `Run.timeline`, `Run.compare` and `Run.calibrated`."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from workbench.cluster.errors import ClusterError
from workbench.cluster.timeline import timeline_of
from workbench.plan.experiment import Experiment, LocalSGD
from workbench.plan.metrics import Row
from workbench.predict.compare import Measurement
from workbench.predict.measured import Timeline
from workbench.train.traces import Sample, read, traced_steps

# The first steps choose kernels and memory, and make the optimizer's state.
_SETTLED = 2


def samples_of(directory: Path, experiment: Experiment, step: int | None) -> tuple[Sample, ...]:
    """What all ranks saw of one traced step; None: of the last.

    Raises:
        ClusterError: that step was not traced, or none was yet.
        ValueError: a trace is damaged.
    """
    world = experiment.plan.world_size
    steps = _traced(directory, experiment)
    if step is not None and step not in steps:
        listed = ", ".join(map(str, steps))
        raise ClusterError(f"step {step} was not traced, or is not kept; there are {listed}")
    return read(directory, steps[-1] if step is None else step, world)


def whole_samples(directory: Path, experiment: Experiment) -> list[tuple[Sample, ...]]:
    """All traced steps of a whole batch; an epoch's last one may be short.

    Steps in which a run still chooses kernels and memory are left out where there are others.

    Raises:
        ClusterError: there is none.
        ValueError: a trace is damaged.
    """
    world = experiment.plan.world_size
    every = [read(directory, step, world) for step in _traced(directory, experiment)]
    whole = [
        samples for samples in every if sum(map(sum, samples[0].rows)) == experiment.batch_size
    ]
    if not whole:
        raise ClusterError(
            f"of the traced steps none has a whole batch of {experiment.batch_size} samples"
        )
    return [samples for samples in whole if samples[0].step >= _SETTLED] or whole


def measurement_of(directory: Path, experiment: Experiment, rows: Sequence[Row]) -> Measurement:
    """What a prediction is held against.

    Raises:
        ClusterError: no step was traced.
        ValueError: a trace is damaged.
    """
    timelines: list[Timeline] = [timeline_of(s) for s in whole_samples(directory, experiment)]
    ranks = range(experiment.plan.world_size)
    settled = [row for row in rows if row["step"] >= _SETTLED] or list(rows)
    plain = [row for row in settled if not _is_traced(row, experiment)] or settled
    if isinstance(experiment.sync, LocalSGD):  # some steps are longer, and count as such
        step_s = [statistics.fmean(map(_seconds, _of(settled, rank))) for rank in ranks]
    else:
        step_s = [statistics.median(map(_seconds, _of(plain, rank))) for rank in ranks]
    peaks = [statistics.median(row["peak_bytes"] for row in _of(settled, rank)) for rank in ranks]
    return Measurement(experiment, tuple(step_s), tuple(peaks), tuple(timelines))


def _traced(directory: Path, experiment: Experiment) -> list[int]:
    steps = traced_steps(directory, experiment.plan.world_size)
    if not steps:
        every = experiment.trace_every
        why = (
            f"its first one is step {every - 1} (trace_every={every}, of {experiment.steps} steps)"
            if every
            else "trace_every is 0"
        )
        raise ClusterError(
            f"no step of this run has been traced: {why}; to have some, train "
            "experiment.replace(trace_every=5) for ten steps or more"
        )
    return steps


def _is_traced(row: Row, experiment: Experiment) -> bool:
    every = experiment.trace_every
    return every > 0 and (row["step"] + 1) % every == 0


def _seconds(row: Row) -> float:
    return row["compute_s"] + row["communication_s"] + row["wait_s"]


def _of(rows: Sequence[Row], rank: int) -> Iterator[Row]:
    return (row for row in rows if row["rank"] == rank)
