"""Who starts, who waits, and for what: decided as people expect it, and said."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.values import GIB, engines, job, running
from workbench.scheduler.jobs import LEVEL_S, refusal
from workbench.scheduler.scheduling import schedule

NOW = 1000.0


def test_jobs_start_side_by_side_and_the_next_one_waits():
    decided = schedule([job(1, 2), job(2, 1), job(3, 2)], engines(4), NOW)
    assert decided.starts == ((1, (0, 1)), (2, (2,)))
    assert decided.reasons[1] == "starts on engines 0, 1"
    assert decided.reasons[3].startswith("waits for 2 engines; 1 is free")


def test_the_one_that_waits_is_told_for_what():
    busy = running(4, (0, 1, 2), seconds=360.0, steps=100, step=50)
    decided = schedule([busy, job(5, 2, memory_bytes=GIB)], engines(4, busy), NOW)
    assert decided.reasons == {5: "waits for 2 engines; 1 is free; starts when job 4 ends"}
    busy = running(4, (0,), began_at=NOW - 60.0)
    decided = schedule([busy, job(5), job(6)], engines(1, busy), NOW)
    assert decided.reasons == {
        5: "waits for 1 engine; none is free; starts when job 4 ends",
        6: "waits for 1 engine; none is free; job 5 comes first",
    }


def test_priority_goes_first_and_waiting_raises_it():
    assert schedule([job(1), job(2, priority=1)], engines(1), NOW).starts[0][0] == 2
    late = job(2, submitted_at=LEVEL_S + 1, priority=1)
    assert schedule([job(1, submitted_at=0.0), late], engines(1), NOW).starts == ((1, (0,)),)


def test_long_jobs_have_a_head_start_that_is_less_than_a_level():
    week, short = job(2, submitted_at=NOW, seconds=6e5), job(1, submitted_at=0.0, seconds=60.0)
    assert schedule([week, short], engines(1), NOW).starts == ((2, (0,)),)
    first = job(1, submitted_at=0.0, seconds=60.0, priority=1)
    assert schedule([week, first], engines(1), NOW).starts == ((1, (0,)),)


def test_time_with_engines_is_no_time_of_waiting():
    again = job(1, submitted_at=0.0, ran_s=900.0)
    assert schedule([again, job(2, submitted_at=899.0)], engines(1), NOW).starts == ((2, (0,)),)


def test_short_jobs_fill_gaps_and_long_ones_do_not():
    busy = running(9, (0, 1), seconds=100.0, steps=10)
    first = job(1, 4, priority=1)
    long, short = job(2, seconds=101.0), job(3, seconds=99.0)
    decided = schedule([busy, first, long, short], engines(4, busy), NOW)
    assert decided.starts == ((3, (2,)),)
    assert decided.reasons[3].endswith("job 1, which waits for more, is not delayed by it")
    assert "job 1 comes first" in decided.reasons[2]


def test_a_job_may_take_for_long_what_the_first_one_leaves():
    busy = running(9, (0, 1), seconds=100.0, steps=10)
    decided = schedule([busy, job(1, 3, priority=1), job(2)], engines(4, busy), NOW)
    assert decided.starts == ((2, (2,)),)  # two become free, and two are: one is left


def test_gpus_are_kept_for_those_that_need_them():
    mixed = [*engines(2, kind="cuda"), *engines(4)[2:]]
    decided = schedule([job(1), job(2, 2, device="cuda"), job(3, 2, device="cuda")], mixed, NOW)
    assert decided.starts == ((1, (2,)), (2, (0, 1)))
    assert "2 engines with cuda; none is free" in decided.reasons[3]


def test_those_who_wait_for_gpus_do_not_have_others_starve():
    gpu = running(8, (0,), device="cuda")
    long = running(9, (1, 2), seconds=50.0, steps=10)
    cluster = [*engines(1, gpu, kind="cuda"), *engines(4, gpu, long)[1:]]
    jobs = [job(1, device="cuda", priority=1), job(2, 3, device="cpu", seconds=90.0)]
    jobs.append(job(3, seconds=90.0))
    decided = schedule([gpu, long, *jobs], cluster, NOW)
    assert decided.starts == ()  # the third would keep the second, which has a time of its own


def test_places_and_the_assistant():
    cluster = [*engines(3), *engines(4, is_assistant=True)[3:]]
    jobs = [job(1, 3), job(2, kind="call", places=(3,)), job(3, kind="call", places=(3,))]
    decided = schedule(jobs, cluster, NOW)
    assert decided.starts == ((1, (0, 1, 2)), (2, (3,)))
    used = running(7, (1,))
    waits = schedule([used, job(4, 2, places=(0, 1))], engines(3, used), NOW)
    assert waits.reasons[4].startswith("waits for engine 1, which job 7 has")


def test_calls_take_turns_on_the_engines_of_their_lease():
    lease = running(1, (1, 2), kind="lease")
    calls = [job(n, kind="call", lease=1, **more) for n, more in [(2, {}), (3, {"places": (2,)})]]
    decided = schedule([lease, *calls], engines(3, lease), NOW)
    assert decided.starts == ((2, (1,)), (3, (2,)))
    going = running(2, (1, 2), kind="call", lease=1)
    decided = schedule([lease, going, calls[1]], engines(3, lease), NOW)
    assert decided.starts == ()
    assert decided.reasons[3] == "waits for engines of lease 1 that job 2 uses"
    waiting = schedule([job(1, 3, kind="lease"), calls[0]], engines(2), NOW)
    assert waiting.reasons[2] == "waits for the engines of lease 1"
    assert (
        "not [0]"
        in schedule(
            [lease, job(5, kind="call", lease=1, places=(0,))], engines(3, lease), NOW
        ).reasons[5]
    )


def test_lesser_jobs_leave_a_checkpoint_for_others():
    low, high = running(1, (0, 1), priority=0), running(2, (2,), priority=5)
    waiting = job(3, 2, priority=2, submitted_at=NOW)
    decided = schedule([low, high, waiting], engines(3, low, high), NOW)
    assert decided.preempt == (1,)
    assert decided.reasons[1] == "leaves a checkpoint for job 3, of priority 2"
    assert decided.reasons[3].endswith("job 1 makes room for it")
    stopping = running(1, (0, 1), priority=0, state="stopping")
    again = schedule([stopping, high, waiting], engines(3, stopping, high), NOW)
    assert (again.starts, again.preempt) == ((), ())


@pytest.mark.parametrize(
    "kept",
    [
        {"preemptible": False},
        {"kind": "call"},
        {"priority": 2},
        {"seconds": 8.0, "steps": 10},  # soon over
    ],
)
def test_others_are_not_pre_empted(kept):
    low = running(1, (0, 1), **kept)
    waiting = job(3, 2, priority=2, submitted_at=NOW)
    assert schedule([low, waiting], engines(2, low), NOW).preempt == ()


def test_nobody_is_pre_empted_in_vain():
    low, high = running(1, (0,), priority=0), running(2, (1,), priority=9)
    waiting = job(3, 2, priority=2, submitted_at=NOW)
    assert schedule([low, high, waiting], engines(2, low, high), NOW).preempt == ()


def test_pre_emption_does_not_go_back_and_forth():
    """A job that waited long goes first, so it is not sent away by what comes after it."""
    old = running(1, (0,), submitted_at=0.0, began_at=LEVEL_S + 10.0)
    young = job(2, priority=1, submitted_at=LEVEL_S + 10.0)
    assert schedule([old, young], engines(1, old), LEVEL_S + 20.0).preempt == ()
    early = running(1, (0,), submitted_at=0.0, began_at=0.0)  # which never waited
    assert schedule([early, young], engines(1, early), LEVEL_S + 20.0).preempt == (1,)
    queued = job(1, submitted_at=0.0, ran_s=LEVEL_S + 20.0)  # as it is then
    assert schedule([queued, young], engines(1), LEVEL_S + 20.0).starts == ((2, (0,)),)


def test_engines_that_are_replaced_are_waited_for():
    cluster = [*engines(1), *engines(2, state="dead")[1:]]
    decided = schedule([job(1, 2)], cluster, NOW)
    assert decided.reasons[1].endswith("starts when engines were replaced")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"engines": 5}, "'net' needs 5 engines, and 4 of 4 are such: at most 4 would fit"),
        (
            {"device": "cuda"},
            "'net' needs 1 engine with cuda, and none is such: there are 4 engines of cpu, "
            "of which the largest has 8.00 GiB",
        ),
        ({"memory_bytes": 9 * GIB}, "with 9.00 GiB, and none is such"),
        ({"engines": 5, "memory_bytes": GIB // 64}, "5 engines with 16.0 MiB, and 4 of 4"),
        ({"places": (7,)}, "there is no [7], but 0, 1, 2, 3, 4"),
        ({"places": (1,), "memory_bytes": 9 * GIB}, "and [1] are not such"),
    ],
)
def test_what_never_fits_is_refused_with_what_would(asked, said):
    cluster = [*engines(4), *engines(5, is_assistant=True)[4:]]
    never = job(1, **{"engines": 1, **asked})
    assert said in refusal(never, cluster)
    assert said in schedule([never], cluster, NOW).reasons[1]


def test_a_thousand_jobs_take_less_than_a_second():
    busy = [running(n + 1, (n,), seconds=100.0 + n, steps=10) for n in range(64)]
    queue = [job(100 + n, 1 + n % 9, seconds=50.0 + n, priority=n % 3) for n in range(1000)]
    cluster = engines(66, *busy)
    begun = time.process_time()
    decided = schedule([*busy, *queue], cluster, NOW)
    assert time.process_time() - begun < 1.0
    assert len(decided.reasons) >= 1000


sizes = st.integers(1, 5)
requests = st.builds(
    dict,
    engines=sizes,
    seconds=st.none() | st.floats(0, 1e4),
    priority=st.integers(-2, 2),
    submitted_at=st.floats(0, NOW),
    device=st.sampled_from([None, "cpu", "cuda"]),
    memory_bytes=st.sampled_from([None, 4 * GIB, 16 * GIB]),
    fixed=st.none() | st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True),
    preemptible=st.booleans(),
)
clusters = st.lists(
    st.tuples(
        st.sampled_from(["cpu", "cuda"]),
        st.sampled_from([8, 32]),
        st.sampled_from(["idle", "dead"]),
    ),
    min_size=8,
    max_size=12,
)


def made(number, request):
    fixed, count = request.pop("fixed"), request.pop("engines")
    if fixed is not None:
        return job(number, len(fixed), places=tuple(fixed), **request)
    return job(number, count, **request)


def cluster_of(kinds):
    return [
        engines(i + 1, kind=kind, memory_bytes=gib * GIB, state=state)[i]
        for i, (kind, gib, state) in enumerate(kinds)
    ]


@settings(max_examples=80, derandomize=True)
@given(st.lists(requests, max_size=12), clusters)
def test_no_engine_is_given_twice_and_requests_are_kept(requests, kinds):
    cluster = cluster_of(kinds)
    jobs = {n: made(n, dict(request)) for n, request in enumerate(requests, 1)}
    decided = schedule(list(jobs.values()), cluster, NOW)
    given_out = [place for _, places in decided.starts for place in places]
    assert len(given_out) == len(set(given_out))
    for number, places in decided.starts:
        wanted = jobs[number]
        assert len(places) == wanted.engines
        assert wanted.places is None or set(places) == set(wanted.places)
        for place in places:
            assert cluster[place].state == "idle"
            assert wanted.device in (None, cluster[place].kind)
            assert (wanted.memory_bytes or 0) <= cluster[place].memory_bytes
    assert decided.reasons.keys() >= jobs.keys()
    assert all(decided.reasons.values())


@settings(max_examples=30, derandomize=True)
@given(st.lists(requests, min_size=1, max_size=10), clusters)
def test_nobody_starves(requests, kinds):
    """Whatever waits has started once enough jobs have ended, though others come all the time."""
    cluster = cluster_of([(kind, gib, "idle") for kind, gib, _ in kinds])
    jobs = {n: made(n, dict(request)) for n, request in enumerate(requests, 1)}
    jobs = {n: each for n, each in jobs.items() if refusal(each, cluster) is None}
    others, now, number = dict[int, object](), NOW, 100
    waiting = dict(jobs)
    going = {}
    for _ in range(200):
        number += 1
        others[number] = job(number, 2, submitted_at=now, seconds=50.0, priority=2)
        unfinished = [*waiting.values(), *others.values(), *(each for each, _ in going.values())]
        held = [each for each, _ in going.values()]
        occupied = {place: each.id for each in held for place in each.held}
        current = [
            each if each.index not in occupied else engines(each.index + 1, *held)[each.index]
            for each in cluster
        ]
        for begun, places in schedule(unfinished, current, now).starts:
            own = waiting.pop(begun, None) or others.pop(begun)
            length = 60.0 if own.seconds is None else own.seconds
            more = {"state": "running", "held": places, "began_at": now}
            going[begun] = (own.__class__(**{**vars(own), **more}), now + length)
        if not waiting:
            return
        now += 2000.0
        going = {n: (each, end) for n, (each, end) in going.items() if end > now}
    raise AssertionError(f"still waiting: {waiting}")
