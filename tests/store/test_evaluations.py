"""What evaluations found is kept line by line, and the best of them is known."""

import math

from workbench.store.evaluations import (
    EVALUATIONS,
    Best,
    add_evaluation,
    last_evaluation,
    read_evaluations,
    worth,
)
from workbench.store.run_folder import META, checkpoint_path


def test_of_a_step_the_last_line_counts(tmp_path):
    assert read_evaluations(tmp_path) == {}
    for done, loss in ((4, 1.0), (2, 3.0), (4, 0.5)):
        add_evaluation(tmp_path, done, {"loss": loss, "miou": math.nan})
    with (tmp_path / EVALUATIONS).open("a") as file:
        file.write('{"done": 6, "lo')  # its writer was killed
    found = read_evaluations(tmp_path)
    assert list(found) == [2, 4]
    assert found[4]["loss"] == 0.5
    assert math.isnan(found[2]["miou"])


def test_the_last_one_has_names_that_a_line_about_a_run_has_room_for(tmp_path):
    assert last_evaluation(tmp_path) == {}
    for done in (4, 2):
        add_evaluation(tmp_path, done, {"loss": done, "accuracy": 0.5, "steps": 7.0})
    assert last_evaluation(tmp_path) == {"test_loss": 4, "accuracy": 0.5, "test_steps": 7.0}


def test_losses_are_to_be_small_and_metrics_large():
    figures = {"loss": 2.0, "f1": 0.5}
    assert [worth(figures, by) for by in ("loss", "-loss", "f1", "-f1")] == [-2.0, -2.0, 0.5, -0.5]
    best = Best().then(1, {"f1": math.nan}, "f1")
    assert best == Best()
    best = best.then(2, {"f1": 0.5}, "f1")
    assert best.then(3, {"f1": 0.5}, "f1") is best  # the first of equal ones
    assert best.then(4, {"f1": 0.6}, "f1") == Best(4, 0.6)


def test_only_what_has_a_checkpoint_can_be_best(tmp_path):
    for done, f1 in ((2, 0.5), (4, 0.9), (6, 0.7)):
        add_evaluation(tmp_path, done, {"f1": f1})
    for done in (2, 6):
        checkpoint_path(tmp_path, done).mkdir()
        (checkpoint_path(tmp_path, done) / META).touch()
    assert Best.of(tmp_path, "f1") == Best(6, 0.7)
    assert Best.of(tmp_path, "f1", before=5) == Best(2, 0.5)
    assert Best.of(tmp_path, "f1", before=1) == Best()
