"""Sets of engines, and times that are kept for jobs that wait."""

from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.scheduler.backfill import (
    EngineRelease,
    WaitingJob,
    choose,
    engines_of,
    indices_of,
    place,
    reserve,
)

ALL = (1 << 8) - 1


@given(st.sets(st.integers(0, 1100)))
def test_sets_are_numbers(indices):
    assert indices_of(engines_of(indices)) == tuple(sorted(indices))


@settings(max_examples=60, derandomize=True)
@given(st.integers(1, ALL), st.lists(st.integers(0, ALL), max_size=3), st.data())
def test_what_is_preferred_is_taken_first(possible, preferred, data):
    count = data.draw(st.integers(0, possible.bit_count()))
    chosen = choose(possible, count, preferred)
    assert chosen & ~possible == 0
    assert chosen.bit_count() == count
    left = possible & ~chosen
    for number, among in enumerate(preferred):
        earlier = engines_of(i for each in preferred[:number] for i in indices_of(each))
        if left & among & ~earlier:  # then none of those that come later was taken
            later = chosen & ~(among | earlier)
            assert not later


def test_the_second_preference_decides_within_the_first():
    assert indices_of(choose(0b1111, 3, (0b1100,), (0b1000, 0b0010))) == (1, 2, 3)


def test_a_reservation_is_for_the_time_when_enough_are_free():
    ends = [
        EngineRelease(5.0, 1, 0b0001),
        EngineRelease(7.0, 2, 0b0110),
        EngineRelease(9.0, 3, 0b1000),
    ]
    found = reserve(WaitingJob(4, ALL, 2, 1.0), 0, ends, 3.0)
    assert (found.time, found.after, found.spare) == (7.0, 2, 1)
    never = reserve(WaitingJob(4, ALL, 5, 1.0), 0, ends, 3.0)
    assert (never.time, never.after) == (float("inf"), None)
    overdue = reserve(WaitingJob(4, ALL, 1, 1.0), 0, ends, 6.0)
    assert overdue.time == 6.0


jobs = st.lists(st.tuples(st.integers(1, ALL), st.integers(1, 4), st.floats(0.1, 100)), max_size=10)


@settings(max_examples=100, derandomize=True)
@given(jobs, st.integers(0, ALL))
def test_what_starts_early_does_not_delay_those_that_wait(requests, free):
    """Once all that starts has ended in time, each reservation is met."""
    queue = [
        WaitingJob(number, eligible, min(need, eligible.bit_count()), seconds)
        for number, (eligible, need, seconds) in enumerate(requests, 1)
    ]
    ends = [EngineRelease(50.0, 99, ALL & ~free)]
    placed = place(queue, free, ends, 0.0)
    taken = 0
    for job, engines in placed.starts:
        assert engines & taken == 0
        assert engines & ~(free & job.eligible) == 0
        assert engines.bit_count() == job.need
        taken |= engines
    assert placed.free == free & ~taken
    for reservation in placed.reservations:
        busy = engines_of(
            index
            for job, engines in placed.starts
            if job.seconds > reservation.time
            for index in indices_of(engines)
        )
        others = ALL & ~free if reservation.time < 50.0 else 0
        there = reservation.job.eligible & ~busy & ~others
        assert there.bit_count() >= reservation.job.need
