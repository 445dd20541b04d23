"""Runs that had ended when they were looked up: listed at once, and read when more is asked for."""

import copy

import pytest

from workbench.client.run.past import PastRun

LONG_S = 60.0
FOREVER = 10**6

pytestmark = pytest.mark.slow


def past_of(cluster, run):
    (found,) = [each for each in cluster.jobs if each.id == run.id]
    return found


def test_they_have_the_state_that_the_run_ended_with(cluster, train):
    runs = []
    for session, end in [
        ("train", None),
        ("slowly", cluster.jobs.stop),
        ("slowly", cluster.jobs.cancel),
        ("diverges", None),
        ("all_raise", None),
    ]:
        run = train(session, steps=FOREVER if end else 5)
        if end:
            end(run)
        assert run.join(LONG_S)
        runs.append(run)
    states = {run.id: run.state for run in runs}
    assert set(states.values()) == {"finished", "stopped", "failed"}
    assert states.items() <= {each.id: each.state for each in cluster.jobs}.items()


def test_their_folders_are_not_opened_before(cluster, train):
    run = train("train").wait(LONG_S)
    hidden = run.directory.rename(run.directory.with_name("hidden"))
    past = past_of(cluster, run)
    assert (past.state, past.is_done, past.directory) == ("finished", True, run.directory)
    hidden.rename(run.directory)
    assert past.metrics.equals(run.metrics)
    assert past.experiment == run.experiment
    assert past.evaluation == run.evaluation


def test_they_are_read_when_their_cluster_waits_for_them(cluster, train):
    run = train("train").wait(LONG_S)
    past = past_of(cluster, run)
    assert past.join(LONG_S)
    run.directory.rename(run.directory.with_name("away"))
    assert len(past.rows) == len(run.rows)


def test_a_failure_is_raised_when_they_are_waited_for(cluster, train):
    run = train("all_raise")
    assert run.join(LONG_S)
    with pytest.raises(type(run.error), match="has no data"):
        past_of(cluster, run).wait(LONG_S)


def test_they_have_no_other_attributes_than_runs(cluster, train):
    past = past_of(cluster, train("train").wait(LONG_S))
    assert isinstance(past, PastRun)
    assert not hasattr(past, "loss")
    assert copy.copy(past_of(cluster, past)).directory == past.directory


def test_a_run_that_goes_on_is_followed_by_one_object(cluster, train):
    run = train("slowly", steps=FOREVER)
    assert past_of(cluster, run) is run
    run.stop()
    assert run.join(LONG_S)
