"""Steps on their way from a run's rows to its loggers."""

import math
import threading

import pytest

import workbench as wb
from tests.client.fake_session import row
from workbench.client.loggers.feed import Feed
from workbench.client.loggers.logger import loggers, step_of
from workbench.store.errors import ClusterError
from workbench.store.run_folder import add_evaluation


def steps(found):
    return [step["step"] for step in found]


def test_a_step_is_of_all_ranks_together():
    ranks = [
        {**row(3, 1), "wait_s": 0.75, "peak_bytes": 7, "loss": 9.0, "accuracy": math.nan},
        {**row(3, 0), "wait_s": 0.25, "peak_bytes": 5, "loss": math.nan, "accuracy": math.nan},
    ]
    found = step_of(ranks)
    assert (found["step"], found["wait_s"], found["peak_bytes"]) == (3, 0.5, 7)
    assert found["samples_per_s"] == 0.5
    assert math.isnan(found["loss"])  # rank 0's, and always there
    assert {"rank", "accuracy"}.isdisjoint(found)


def test_steps_come_once_all_ranks_have_made_them_and_the_run_s_end_waits_for_that(played):
    found = []
    played.step(0)  # before anybody listened
    played.subscribe(Feed(played, loggers(found.append)))
    played.step(1, 1)
    played.step(2, 1)
    played.step(1, 0)
    played.end()
    assert steps(found) == [0, 1]
    played.end()
    assert steps(found) == [0, 1]


def test_a_step_that_is_run_again_comes_again(played):
    found = []
    played.subscribe(Feed(played, loggers(found.append)))
    played.step(0)
    played.step(1, 0)
    for number in (0, 1):  # after a fault
        played.step(number)
    played.end("stopped")
    played.step(2)  # it was resumed
    played.end()
    assert steps(found) == [0, 0, 1, 2]


def test_a_logger_that_raises_is_noted_once_and_the_others_go_on(played):
    found = []

    def broken(step):
        raise OSError("no room")

    played.subscribe(Feed(played, loggers([broken, found.append])))
    for number in range(3):
        played.step(number)
    played.end()
    assert steps(found) == [0, 1, 2]
    (note,) = played.notes
    assert "broken" in note
    assert "no room" in note


def test_one_logger_cannot_change_what_another_gets(played):
    found = []
    played.subscribe(Feed(played, loggers([dict.clear, found.append])))
    played.step(0)
    played.end()
    assert steps(found) == [0]


class Refusing:
    """Cannot be opened."""

    def require(self):
        pass

    def open(self, run):
        raise RuntimeError(f"nobody is logged in for {run.name}")


class Closing:
    """Its logs cannot be closed."""

    def __init__(self):
        self.run = self.ended = None

    def require(self):
        pass

    def open(self, run):
        self.run = run
        return self

    def write(self, step):
        pass

    def close(self, state, evaluation):
        self.ended = (state, evaluation)
        raise RuntimeError("too late")


def test_loggers_are_told_of_what_runs_and_of_how_it_ended(played):
    closing = Closing()
    played.subscribe(Feed(played, loggers([Refusing(), closing])))
    played.step(0)
    played.end("stopped", accuracy=0.5)
    assert closing.run.name == played.directory.name
    assert closing.run.configuration["lr"] == played.experiment.optimizer.lr
    assert closing.run.configuration["world_size"] == 2
    assert closing.ended == ("stopped", {"accuracy": 0.5})
    assert ["nobody is logged in" in played.notes[0], "too late" in played.notes[1]] == [True] * 2


def test_a_step_has_what_was_evaluated_behind_it(played):
    played.experiment = played.experiment.replace(steps=4, evaluate_every=2)
    told = []
    played.subscribe(Feed(played, loggers(told.append)))
    for step in range(4):
        if step % 2:
            add_evaluation(played.directory, step + 1, {"loss": 0.5, "miou": 0.1 * step})
        played.step(step)
    played.end()
    assert [step.get("test_miou") for step in told] == [None, 0.1, None, 0.1 * 3]
    assert told[1]["test_loss"] == 0.5


def test_a_logger_that_hangs_does_not_hold_the_run(played):
    may_go_on = threading.Event()
    played.subscribe(Feed(played, loggers(lambda _step: may_go_on.wait()), last_s=0.01))
    played.step(0)
    played.end()
    assert played.notes == ["loggers were not done 0.01 s after the run had ended"]
    may_go_on.set()


def test_what_is_no_logger_is_refused():
    assert loggers(None) == ()
    for wrong in (7, wb.JSONLines, [print, "steps.jsonl"]):
        with pytest.raises(TypeError, match="log takes loggers"):
            loggers(wrong)


def test_a_missing_package_is_an_error_before_anything_is_submitted(cluster, train, monkeypatch):
    monkeypatch.setattr("workbench.client.records.optional.find_spec", lambda _name: None)
    experiment = train("train", steps=1).wait(60.0).experiment
    before = len(cluster.jobs)
    for logger in (wb.TensorBoard("t"), wb.WandB()):
        extra = type(logger).__name__.lower()
        with pytest.raises(ModuleNotFoundError, match=rf"parallel-workbench\[{extra}\]"):
            cluster.train(experiment, log=[print, logger])
    assert len(cluster.jobs) == before


def test_a_run_is_logged_while_it_goes_on_and_afterwards(cluster, train, tmp_path):
    found = []
    run = train("train", steps=3)
    run.log_to(found.append)
    run.wait(60.0)
    later = []
    wb.Run.load(run.directory).log_to(later.append, wb.JSONLines(tmp_path / "new" / "steps.jsonl"))
    assert steps(found) == steps(later) == [0, 1, 2]
    assert found == later
    assert len((tmp_path / "new" / "steps.jsonl").read_text().splitlines()) == 3
    with_log = cluster.train(run.experiment, log=[(third := []).append])
    assert with_log.wait(60.0).state == "finished"
    assert len(third) == 3
    with pytest.raises(ClusterError):
        wb.Run.load(tmp_path).log_to(print)
