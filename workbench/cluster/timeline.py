"""From what ranks wrote of a traced step to its timeline.

    compute         a stretch of computation, less what blocked it
                    wait | collective    a collective that the rank does not compute beside: until
                                         the last rank of its group has come to it, and then
                    wait                 for a collective beside the computation
    communication   wait | collective    such a collective, behind those that ended before it

A rank's thread that advances a collective beside its computation does so within a stretch, which
takes the longer for it, as it does in a predicted step.
"""

from collections.abc import Iterator, Mapping, Sequence

from workbench.plan.span import Lane, Span
from workbench.predict.measured import Timeline
from workbench.train.rank_trace import Called, united, without
from workbench.train.traces import Sample

Arrivals = Mapping[tuple[str, int], float]


def timeline_of(samples: Sequence[Sample]) -> Timeline:
    """The timeline of a step.

    Args:
        samples: of all ranks, in their order.
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
