"""Progress, budget and parts of benchmarks, on a clock of their own."""

import pytest

from workbench.bench.harness.progress import Part, Progress


class Clock:
    def __init__(self):
        self.s = 0.0

    def __call__(self):
        return self.s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def said():
    return []


@pytest.fixture
def progress(clock, said):
    def make(**fields):
        return Progress(say=said.append, now=clock, **fields)

    return make


def taken(progress, clock, part, seconds, items=None):
    """The items of a part, each of which takes so long."""
    found = []
    for item in progress.each(part, items):
        clock.s += seconds
        found.append(item)
    return found


def test_without_a_budget_everything_runs(progress, clock):
    whole = progress()
    whole.begin(Part("rounds", 3, 1.0), Part("cases", 2, 1.0))
    assert taken(whole, clock, "rounds", 1000.0) == [0, 1, 2]
    assert taken(whole, clock, "cases", 1000.0, ["a", "b"]) == ["a", "b"]
    assert whole.notes() == ()


def test_rounds_follow_from_the_budget(progress, clock):
    short = progress(budget_s=100.0)
    short.begin(Part("rounds", 50, 1.0), Part("cases", 50, 1.0))
    assert len(taken(short, clock, "rounds", 10.0)) == 5
    assert len(taken(short, clock, "cases", 20.0)) == 2
    assert clock.s <= 100.0
    assert short.notes() == ("Not all was run: 5 of 50 of rounds, 2 of 50 of cases.",)


def test_what_a_part_does_not_use_the_next_one_has(progress, clock):
    short = progress(budget_s=100.0)
    short.begin(Part("quick", 10, 10.0), Part("slow", 10, 10.0))
    assert len(taken(short, clock, "quick", 1.0)) == 10
    assert len(taken(short, clock, "slow", 10.0)) == 9


def test_the_first_part_runs_once_at_least(progress, clock):
    """Others that fit into what is left do, too."""
    short = progress(budget_s=61.0)
    short.begin(Part("rounds", 7, 10.0), Part("long", 7, 1.0), Part("brief", 7, 0.1))
    assert taken(short, clock, "rounds", 60.0) == [0]
    assert taken(short, clock, "long", 6.0) == []
    assert taken(short, clock, "brief", 0.6) == [0]
    assert short.notes() == ("Not all was run: 1 of 7 of rounds, 0 of 7 of long, 1 of 7 of brief.",)


def test_only_one_part_runs_and_has_the_whole_budget(progress, clock):
    one = progress(budget_s=100.0, only="cases")
    one.begin(Part("rounds", 50, 1.0), Part("cases", 50, 1.0))
    assert taken(one, clock, "rounds", 10.0) == []
    assert len(taken(one, clock, "cases", 10.0)) == 10
    assert (one.wants("rounds"), one.wants("cases")) == (False, True)
    assert one.notes()[0] == "Only the part cases."


def test_an_unknown_part_lists_the_known(progress):
    with pytest.raises(ValueError, match="no part 'grit': rounds, grid"):
        progress(only="grit").begin(Part("rounds", 1, 1.0), Part("grid", 1, 1.0))


def test_the_time_left_is_corrected_by_what_was_done(progress, clock, said):
    """Units take twice as long as was thought: those of a part that has not begun, too."""
    whole = progress()
    whole.begin(Part("rounds", 3, 100.0), Part("cases", 1, 50.0))
    taken(whole, clock, "rounds", 200.0)
    taken(whole, clock, "cases", 100.0, ["vgg11"])
    assert said == [
        "[0:00, some 6 min left] rounds 1/3",
        "[3:20, some 8 min left] rounds 2/3",
        "[6:40, some 5 min left] rounds 3/3",
        "[10:00, some 2 min left] cases 1/1 vgg11",
    ]


def test_no_more_time_is_left_than_the_budget_s(progress, clock, said):
    short = progress(budget_s=60.0)
    short.begin(Part("rounds", 100, 30.0))
    taken(short, clock, "rounds", 30.0)
    assert said == ["[0:00, some 60 s left] rounds 1/100", "[0:30, some 30 s left] rounds 2/100"]


@pytest.mark.parametrize(("budget_s", "rounds"), [(None, 7), (50.0, 3), (1.0, 2), (1000.0, 7)])
def test_rounds_within_a_unit_follow_from_the_budget_too(progress, budget_s, rounds):
    some = progress(budget_s=budget_s)
    some.begin(Part("sizes", 10, 10.0))
    assert some.fitting(7) == rounds
