"""What people request of a running job: who comes first, what is done, and what is kept."""

import threading

from tests.train.small import net
from workbench.model.tracing.trace import trace
from workbench.plan.plan import Plan
from workbench.train.loop.requests import (
    CarriedOut,
    LearningRate,
    LearningRates,
    RunRequests,
    SaveNow,
)

GRAPH = trace(net(), input_shape=(3, 8, 8))
PLAN = Plan.hybrid(GRAPH, 2)


def test_requests_are_read_as_they_were_made(tmp_path):
    requests = RunRequests(tmp_path)
    assert (requests.newest(), requests.last_carried_out(), requests.changed_at) == (0, 0, 0)
    made = [LearningRate(0.05), PLAN, SaveNow()]
    assert [requests.submit(each) for each in made] == [1, 2, 3]
    assert RunRequests(tmp_path).newest() == 3
    assert [requests.read(number, GRAPH) for number in (1, 2, 3)] == made
    assert requests.carried_out(2) is None
    requests.carry_out(2, CarriedOut(7, 0.5, (3, 4)))
    assert requests.carried_out(2) == CarriedOut(7, 0.5, (3, 4))
    assert requests.last_carried_out() == 2
    requests.carry_out(1, CarriedOut(3))
    assert requests.last_carried_out() == 2


def test_requests_of_several_people_all_have_their_number(tmp_path):
    people = [RunRequests(tmp_path) for _ in range(4)]
    numbers = []

    def request(person):
        for _ in range(20):
            numbers.append(person.submit(SaveNow()))

    threads = [threading.Thread(target=request, args=[person]) for person in people]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 81))
    assert not list((tmp_path / "requests").glob("*.part"))


def test_every_step_has_the_rate_that_it_had(tmp_path):
    requests = RunRequests(tmp_path)
    rates = LearningRates.of(0.1, requests)
    for step, value in ((40, 0.05), (57, 0.02), (57, 0.03)):
        rates, done = rates.then(step, value)
        requests.carry_out(requests.submit(LearningRate(value)), done)
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


def test_a_later_request_for_an_earlier_step_counts():
    """A run was set back to step 50 by a fault, and somebody changed their mind at step 53."""
    rates, _ = LearningRates(0.1).then(57, 0.05)
    rates, done = rates.then(53, 0.2)
    assert done.before == 0.1
    assert [rates.at(step) for step in (52, 53, 57)] == [0.1, 0.2, 0.2]
