"""What people request of a running job: who comes first, what is done, and what is kept."""

import sys
import threading

import pytest

from tests.train.small import GRAPH
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.extension.user_object import OwnObjectError, opened
from workbench.plan.plans.plan import Plan
from workbench.train.run.requests import (
    CarriedOut,
    LearningRate,
    LearningRates,
    RunRequests,
    SaveNow,
)

PLAN = Plan.hybrid(GRAPH, 2)


def test_requests_are_read_as_they_were_made(tmp_path):
    requests = RunRequests(tmp_path)
    assert (requests.newest(), requests.last_carried_out(), requests.changed()) == (0, 0, False)
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


def carried(requests, request, step, **fields):
    number = requests.submit(request)
    requests.carry_out(number, CarriedOut(step, **fields))
    return number


def run_of(plan):
    return Experiment(plan=plan, data="synthetic", optimizer="sgd", steps=99)


def test_a_run_goes_on_under_its_last_plan(tmp_path):
    requests, first = RunRequests(tmp_path), Plan.data_parallel(GRAPH, 2)
    assert requests.in_force(run_of(first)).plan == first
    assert requests.replanned_at() == 0
    carried(requests, Plan.hybrid(GRAPH, 2, 1), 10)
    carried(requests, LearningRate(0.5), 15)
    carried(requests, PLAN, 20)
    carried(requests, SaveNow(), 30)
    requests.submit(first)  # and is not carried out
    assert requests.in_force(run_of(first)).plan == PLAN
    assert requests.in_force(run_of(first)).steps == 99
    assert requests.replanned_at() == 20


def test_a_plan_of_other_ranks_leaves_the_experiment(tmp_path):
    requests = RunRequests(tmp_path)
    carried(requests, PLAN, 10)
    carried(requests, Plan.data_parallel(GRAPH, 4), 20)
    experiment = run_of(Plan.data_parallel(GRAPH, 2))
    assert requests.in_force(experiment) == experiment


def test_rates_and_checkpoints_are_listed_apart_in_their_order(tmp_path):
    requests = RunRequests(tmp_path)
    asked = [LearningRate(0.5), SaveNow(), PLAN, LearningRate(0.2), SaveNow(), LearningRate(0.1)]
    for step, request in enumerate(asked[:-1], 10):
        carried(requests, request, step)
    requests.submit(asked[-1])
    assert [(n, value, done.step) for n, value, done in requests.rates()] == [
        (1, 0.5, 10),
        (4, 0.2, 13),
    ]
    assert [(number, done.step) for number, done in requests.saved()] == [(2, 11), (5, 14)]


def test_what_cannot_be_read_is_not_carried_out(tmp_path):
    requests = RunRequests(tmp_path)
    for content in ("[carried_out", "", "[other]\n", "[carried_out]\nstep = 'x'\n"):
        number = requests.submit(LearningRate(0.5))
        done = tmp_path / "requests" / f"{number:04d}.done.toml"
        done.write_text(content)
        assert requests.carried_out(number) is None
    assert list(requests.rates()) == []
    assert requests.last_carried_out() == 4


def test_what_became_of_a_request_has_defaults():
    assert CarriedOut(3) == CarriedOut(3, 0.0, (), None)


def test_carrying_out_again_replaces_what_was_noted(tmp_path):
    requests = RunRequests(tmp_path)
    number = carried(requests, SaveNow(), 4)
    requests.carry_out(number, CarriedOut(5))
    assert requests.carried_out(number) == CarriedOut(5)


def test_rates_without_a_note_of_the_one_before_begin_with_the_experiment_s(tmp_path):
    requests = RunRequests(tmp_path)
    assert LearningRates.of(0.3, requests) == LearningRates(0.3)
    carried(requests, LearningRate(0.5), 4)
    found = LearningRates.of(0.3, requests)
    assert [found.at(step) for step in (3, 4)] == [0.3, 0.5]


def test_what_a_request_names_is_not_imported(tmp_path):
    """Whoever may write into the run's folder can put one there."""
    text = Plan.hybrid(GRAPH, 2).to_toml().replace('"shard_out"', '"antigravity:Scheme"')
    assert "antigravity" in text
    (tmp_path / "requests").mkdir()
    (tmp_path / "requests" / "0001.toml").write_text(text)
    found = RunRequests(tmp_path).read(1, GRAPH)
    assert not found.is_at_hand
    with pytest.raises(OwnObjectError, match="trust=True"):
        opened(found)
    assert "antigravity" not in sys.modules
