"""What was measured of a run, for `Run.timeline`, `Run.compare` and `Run.calibrated`.

A timeline is made from what ranks wrote of a traced step:

    compute         a stretch of computation, less what blocked it
                    wait | collective    a collective that the rank does not compute beside: until
                                         the last rank of its group has come to it, and then
                    wait                 for a collective beside the computation
    communication   wait | collective    such a collective, behind those that ended before it

A rank's thread that advances a collective beside its computation does so within a stretch, which
takes the longer for it, as it does in a predicted step.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.metrics import Lane, Row, Span
from workbench.predict.compare import Measurement
from workbench.predict.measured import Timeline
from workbench.store.errors import ClusterError
from workbench.train.run.requests import RunRequests
from workbench.train.trace.trace import Called, Sample, read, traced_steps, united, without

Arrivals = Mapping[tuple[str, int], float]


def timeline_of(samples: Sequence[Sample]) -> Timeline:
    """The timeline of a step.

    Args:
        samples: what all ranks saw of the step, in their order.
    """
    first = min(sample.since_s for sample in samples)
    offsets = [sample.since_s - first for sample in samples]
    last = arrivals(samples, offsets)
    lanes = []
    for sample, offset in zip(samples, offsets, strict=True):
        spans = [*_compute(sample, offset, last), *_communication(sample, offset, last)]
        # What takes no time goes before what begins then.
        lanes.append(tuple(sorted(spans, key=lambda span: (span.start_s, span.seconds))))
    return Timeline(
        samples[0].step, tuple(lanes), tuple(sample.trace.seconds for sample in samples)
    )


def arrivals(samples: Sequence[Sample], offsets: Sequence[float]) -> Arrivals:
    """When the last rank came to each collective, by group and number."""
    last: dict[tuple[str, int], float] = {}
    for sample, offset in zip(samples, offsets, strict=True):
        for call in sample.trace.calls:
            key, begin = (call.group, call.number), offset + call.during[0]
            last[key] = max(last.get(key, begin), begin)
    return last


def _compute(sample: Sample, offset: float, last: Arrivals) -> Iterator[Span]:
    rank, trace = sample.rank, sample.trace
    blocked = united(interval for call in trace.calls for interval in call.blocked)
    for stretch in trace.stretches:
        for begin, end in without(stretch.during, blocked):
            yield Span(rank, "compute", stretch.what, stretch.label, offset + begin, end - begin)
    for call in trace.calls:
        if not call.beside:
            # In between, the thread may have been at something else.
            *waits, (came, over) = call.blocked or (call.during,)
            yield from _met(rank, "compute", call, offset, last, (came, over))
        else:
            waits = list(call.blocked)
        for begin, end in waits:
            yield Span(rank, "compute", "wait", call.layer, offset + begin, end - begin)


def _communication(sample: Sample, offset: float, last: Arrivals) -> Iterator[Span]:
    free_at = 0.0
    for call in sorted(sample.trace.calls, key=lambda call: call.during[1]):
        if call.beside:
            span = (max(call.during[0], free_at), call.during[1])
            yield from _met(sample.rank, "communication", call, offset, last, span)
            free_at = call.during[1]


def _met(
    rank: int,
    lane: Lane,
    call: Called,
    offset: float,
    last: Arrivals,
    during: tuple[float, float],
) -> Iterator[Span]:
    """A collective: until the last rank has come, and from then on."""
    came, end = during
    begin = min(max(last[call.group, call.number] - offset, came), end)
    if begin > came:
        yield Span(rank, lane, "wait", call.layer, offset + came, begin - came)
    yield Span(
        rank,
        lane,
        "collective",
        call.layer,
        offset + begin,
        end - begin,
        op=call.op,
        phase=call.phase,
        bytes=call.bytes,
    )


# The first steps choose kernels and memory, and make the optimizer's state.
_SETTLED = 2


def samples_of(directory: Path, experiment: Experiment, step: int | None) -> tuple[Sample, ...]:
    """What all ranks saw of one traced step; None: of the last.

    Raises:
        ClusterError: the step was not traced, or none was yet.
        ValueError: a trace is damaged.
    """
    world = experiment.plan.world_size
    steps = _traced(directory, experiment)
    if step is not None and step not in steps:
        listed = ", ".join(map(str, steps))
        raise ClusterError(f"step {step} was not traced, or is not kept; there are {listed}")
    return read(directory, steps[-1] if step is None else step, world)


def whole_samples(directory: Path, experiment: Experiment) -> list[tuple[Sample, ...]]:
    """All traced steps of a whole batch under the present plan; an epoch's last one may be short.

    Steps in which a run still chooses kernels and memory are left out where there are others.

    Raises:
        ClusterError: there is none.
        ValueError: a trace is damaged.
    """
    world, since = experiment.plan.world_size, RunRequests(directory).replanned_at()
    steps = [step for step in _traced(directory, experiment) if step >= since]
    if not steps:
        raise ClusterError(
            f"no step has been traced since step {since}, when this run went on under another plan"
        )
    every = [read(directory, step, world) for step in steps]
    whole = [
        samples for samples in every if sum(map(sum, samples[0].rows)) == experiment.batch_size
    ]
    if not whole:
        raise ClusterError(
            f"of the traced steps none has a whole batch of {experiment.batch_size} samples"
        )
    return [samples for samples in whole if samples[0].step >= since + _SETTLED] or whole


def measurement_of(directory: Path, experiment: Experiment, rows: Sequence[Row]) -> Measurement:
    """What a prediction is held against: the steps under the plan that the run has now.

    Raises:
        ClusterError: no step was traced.
        ValueError: a trace is damaged.
    """
    since = RunRequests(directory).replanned_at()
    rows = [row for row in rows if row["step"] >= since]
    timelines: list[Timeline] = [timeline_of(s) for s in whole_samples(directory, experiment)]
    ranks = range(experiment.plan.world_size)
    settled = [row for row in rows if row["step"] >= since + _SETTLED] or rows
    plain = [row for row in settled if not _is_traced(row, experiment)] or settled
    if experiment.sync.timing.every > 1:  # some steps are longer, and count as such
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
