"""Runs that are read back from their folders, without a cluster."""

import shutil
import sys

import pandas
import pytest
import torch

import workbench as wb
from tests.plan.graphs import mlp
from workbench.client.records.recorded import UNFINISHED
from workbench.store.errors import ClusterError, Diverged, RankError
from workbench.store.messages import Answer


def test_a_run_is_what_it_was(finished, moved, monkeypatch):
    monkeypatch.setattr(Answer, "unpack", None)  # pickled: never read from a folder
    before = {path: path.stat().st_mtime_ns for path in moved.rglob("*")}
    run = wb.Run.load(moved)
    assert {path: path.stat().st_mtime_ns for path in moved.rglob("*")} == before
    assert (run.state, run.is_done, run.id) == ("finished", True, finished.id)
    assert run.experiment == finished.experiment
    assert run.experiment.optimizer.lr == 0.05
    pandas.testing.assert_frame_equal(run.metrics, finished.metrics)
    assert run.evaluation == finished.evaluation
    assert run.notes == finished.notes
    assert any("learning rate 0.05" in note for note in run.notes)
    assert run.environment == finished.environment
    assert run.engines == (0, 1)
    assert run.checkpoint == moved / finished.checkpoint.name
    weights = finished.state_dict()
    assert all(torch.equal(each, weights[name]) for name, each in run.state_dict().items())
    assert run.timeline() == finished.timeline()
    assert run.outcomes[1].traffic == finished.outcomes[1].traffic
    assert repr(run) == repr(finished).replace(finished.directory.name, "elsewhere")
    assert run.wait() is run


def test_what_needs_a_cluster_says_so(moved):
    run = wb.Run.load(moved)
    assert run.cluster is None
    run.stop()
    run.pause()
    with pytest.raises(ClusterError, match="cluster's database"):
        run.events()
    with pytest.raises(ClusterError, match="all 6 steps are done"):
        run.resume()
    run.state = "stopped"
    with pytest.raises(ClusterError, match="a cluster goes on with it"):
        run.resume()


def test_a_cluster_goes_on_with_it(past):
    assert past.again.metrics["step"].tolist() == [6, 6, 7, 7]


def test_metrics_are_had_without_what_ranks_wrote(finished, moved):
    shutil.rmtree(moved / "attempts")
    found = wb.Run.load(moved).metrics
    pandas.testing.assert_frame_equal(found, finished.metrics)


def test_notes_are_told_anew_where_nobody_kept_them(finished, moved):
    (moved / "notes.json").unlink()
    assert wb.Run.load(moved).notes == finished.notes


def test_a_folder_that_does_not_say_how_a_run_ended(moved):
    (moved / "outcome.json").unlink()
    run = wb.Run.load(moved)
    assert (run.state, run.evaluation, run.notes[-1]) == ("unfinished", {}, UNFINISHED)
    assert len(run.metrics) == 12
    assert run.checkpoint is not None


@pytest.mark.parametrize(
    ("session", "error"), [("last_rank_raises", RankError), ("diverges", Diverged)]
)
def test_a_failed_run_raises_what_it_raised(past, session, error):
    run = past.failed[session]
    again = wb.Run.load(run.directory)
    assert again.state == "failed"
    with pytest.raises(error) as raised:
        again.wait()
    assert str(raised.value) == str(run.error)
    assert again.metrics["loss"].tolist() == run.metrics["loss"].tolist()


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ClusterError, match=r"no run's folder: experiment\.toml is not there"):
        wb.Run.load(tmp_path)


def test_what_a_folder_names_is_imported_with_trust_alone(tmp_path):
    plan = wb.Plan.data_parallel(mlp(4, 4), 2)
    experiment = wb.Experiment(
        plan=plan, data="digits", loss="antigravity:loss", optimizer="sgd", steps=1
    )
    experiment.save(tmp_path / "experiment.toml")
    run = wb.Run.load(tmp_path)
    assert run.experiment == experiment
    assert repr(run)
    assert not run.experiment.loss.function.is_at_hand
    assert wb.Run.load(tmp_path, trust=True).experiment.loss.function.is_at_hand
    assert "antigravity" not in sys.modules
