"""The schedule is near the best that can be, and the simulation is of the scheduler itself."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.values import engines, job
from workbench.bench.jobserver import Load, bound, mixed, simulate
from workbench.scheduler.scheduling import schedule
from workbench.store.record import JobRecord

ENGINES = 6
loads = st.builds(
    lambda arrival, engines, seconds, off: Load(arrival, engines, seconds, seconds * off),
    st.floats(0, 100),
    st.integers(1, ENGINES),
    st.floats(0.1, 200),
    st.floats(0.5, 2.0),
)


@settings(max_examples=60, derandomize=True)
@given(st.lists(loads, min_size=1, max_size=20))
def test_no_engine_is_used_twice_and_the_bound_holds(queue):
    simulated = simulate(queue, ENGINES)
    began = zip(simulated.starts, queue, strict=True)
    spans = [(start, start + load.seconds, load) for start, load in began]
    for start, _, load in spans:
        assert start >= load.arrival
        assert sum(other.engines for a, b, other in spans if a <= start < b) <= ENGINES
    assert simulated.bound <= simulated.makespan * (1 + 1e-12)
    assert 0 < simulated.efficiency <= 1 + 1e-12


def test_the_bound_is_reached_where_the_best_schedule_is_known():
    assert bound([Load(0, 3, 4, 4), Load(0, 3, 2, 2)], 4) == 6.0
    assert bound([Load(0, 2, 4, 4)] * 3, 4) == 6.0
    assert bound([Load(0, 1, 4, 4), Load(9, 1, 2, 2)], 4) == 11.0
    assert simulate([Load(0, 3, 4, 4), Load(0, 1, 4, 4)], 4).efficiency == 1.0


@settings(max_examples=20, derandomize=True)
@given(st.lists(loads, min_size=1, max_size=10))
def test_the_scheduler_does_the_same_with_records(queue):
    """All that `schedule` adds to `place` is for jobs that are not of one kind."""
    queue = [Load(load.arrival, load.engines, load.predicted, load.predicted) for load in queue]
    simulated = simulate(queue, ENGINES)
    jobs = {
        number: job(
            number, load.engines, submitted_at=load.arrival, seconds=load.predicted, steps=10
        )
        for number, load in enumerate(queue, 1)
    }
    starts = {}
    times = sorted({load.arrival for load in queue})
    for _ in count():
        now = times.pop(0)
        known = []
        for each in jobs.values():
            left = starts.get(each.id, now) + each.seconds - now
            if each.submitted_at <= now and left > 1e-9:
                step = 10 * (1 - left / each.seconds) if each.held else 0
                known.append(JobRecord(**{**vars(each), "step": step}))
        busy = [each for each in known if each.held]
        for number, places in schedule(known, engines(ENGINES, *busy), now).starts:
            starts[number] = now
            more = {"state": "running", "held": places, "began_at": now}
            jobs[number] = JobRecord(**{**vars(jobs[number]), **more})
            times = sorted({*times, now + jobs[number].seconds})
        if not times:
            break
    assert [starts[n] for n in sorted(starts)] == pytest.approx(simulated.starts)


@pytest.mark.parametrize("seed", range(4))
def test_a_mixed_queue_wastes_less_than_a_twentieth(seed):
    assert simulate(mixed(600, 32, seed=seed), 32).efficiency >= 0.95


def test_what_never_fits_is_refused():
    with pytest.raises(ValueError, match="1 to 2 engines"):
        simulate([Load(0, 3, 1, 1)], 2)
    with pytest.raises(ValueError, match="loads"):
        simulate([], 2)
