"""What people wish of a run while it goes on: who comes first, what is done, and what is kept."""

import threading

from tests.train.small import net
from workbench.model.trace import trace
from workbench.plan.plan import Plan
from workbench.train.loop.learning_rates import LearningRates
from workbench.train.reshard.requests import CarriedOut, LearningRate, RunRequests, SaveNow

GRAPH = trace(net(), input_shape=(3, 8, 8))
PLAN = Plan.hybrid(GRAPH, 2)


def test_wishes_are_read_as_they_were_made(tmp_path):
    wishes = RunRequests(tmp_path)
    assert (wishes.newest(), wishes.last_carried_out(), wishes.changed_at) == (0, 0, 0)
    made = [LearningRate(0.05), PLAN, SaveNow()]
    assert [wishes.wish(each) for each in made] == [1, 2, 3]
    assert RunRequests(tmp_path).newest() == 3
    assert [wishes.read(number, GRAPH) for number in (1, 2, 3)] == made
    assert wishes.carried_out(2) is None
    wishes.carry_out(2, CarriedOut(7, 0.5, (3, 4)))
    assert wishes.carried_out(2) == CarriedOut(7, 0.5, (3, 4))
    assert wishes.last_carried_out() == 2


def test_wishes_of_several_people_all_have_their_number(tmp_path):
    people = [RunRequests(tmp_path) for _ in range(4)]
    numbers = []

    def wish(person):
        for _ in range(20):
            numbers.append(person.wish(SaveNow()))

    threads = [threading.Thread(target=wish, args=[person]) for person in people]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 81))
    assert not list((tmp_path / "wishes").glob("*.part"))


def test_every_step_has_the_rate_that_it_had(tmp_path):
    wishes = RunRequests(tmp_path)
    rates = LearningRates.of(0.1, wishes)
    for step, value in ((40, 0.05), (57, 0.02), (57, 0.03)):
        rates, done = rates.then(step, value)
        wishes.carry_out(wishes.wish(LearningRate(value)), done)
    # The experiment may be known with its last rate by now: the first steps have theirs.
    for found in (rates, LearningRates.of(0.03, RunRequests(tmp_path))):
        assert [found.at(step) for step in (0, 39, 40, 56, 57, 99)] == [
            0.1,
            0.1,
            0.05,
            0.05,
            0.03,
            0.03,
        ]


def test_a_later_wish_for_an_earlier_step_counts():
    """A run was set back to step 50 by a fault, and somebody changed their mind at step 53."""
    rates, _ = LearningRates(0.1).then(57, 0.05)
    rates, done = rates.then(53, 0.2)
    assert done.before == 0.1
    assert [rates.at(step) for step in (52, 53, 57)] == [0.1, 0.2, 0.2]
