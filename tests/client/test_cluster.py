"""Runs on real engines, with fake sessions."""

import json
import os
import signal
import threading

import pytest

from tests.client import leftovers
from tests.plan.graphs import mlp
from tests.store.test_messages import experiment
from workbench.client.cluster import Cluster
from workbench.hosts.processes import until as until_s
from workbench.model.errors import CheckpointError
from workbench.plan import Plan
from workbench.store.errors import ClusterError, ControlMessageTooLarge, Diverged, RankError
from workbench.store.process import ProcessIdentity
from workbench.supervisor.starting import supervisor_of

LONG_S = 300.0
FOREVER = 10**9


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """One for this module alone, which breaks it and at last stops it."""
    directory = tmp_path_factory.mktemp("runs")
    with Cluster(2, directory=directory, timeout=60.0) as cluster:
        yield cluster


def until(done, seconds) -> bool:
    return until_s(done, seconds, 0.02)


def running(run) -> None:
    """Returns when the run has sent its first rows."""
    started = threading.Event()
    unsubscribe = run.subscribe(lambda rows: started.set() if rows else None)
    while not run.rows and not run.is_done:
        started.wait(0.1)
    unsubscribe()
    assert not run.is_done, run


@pytest.mark.slow
def test_a_run_goes_on_by_itself_and_leaves_its_files(cluster, train):
    run = train("slowly", steps=40)
    assert run.state in ("starting", "running")
    running(run)
    assert cluster.occupied.keys() == {0, 1}
    assert "2 busy" in repr(cluster)
    run.wait(LONG_S)
    assert run.state == "finished"
    assert [outcome.step for outcome in run.outcomes] == [40, 40]
    assert len(run.metrics) == len(run.rows) == 80
    assert run.metrics["step"].tolist() == [step for step in range(40) for _rank in (0, 1)]
    assert run.directory.parent == cluster.directory
    found = {path.name for path in run.directory.iterdir()}
    told = {"environment.json", "experiment.toml", "metrics.csv", "outcome.json"}
    told |= {"attempts", "initial.safetensors"}
    assert found - {"machine.toml"} == told  # if this host was calibrated
    assert cluster.occupied == {}


def test_no_row_is_lost_however_many_there_are(train):
    run = train("in_a_hurry", steps=5000).wait(LONG_S)
    for rank in (0, 1):
        assert [row["step"] for row in run.rows if row["rank"] == rank] == list(range(5000))
    assert run.notes == []


def test_stop_ends_all_ranks_after_the_same_step_with_a_checkpoint(train):
    run = train("slowly", steps=FOREVER)
    running(run)
    run.stop()
    run.wait(LONG_S)
    assert run.state == "stopped"
    first, second = run.outcomes
    assert first.step == second.step == len(run.rows) // 2
    assert run.checkpoint is not None
    assert run.checkpoint.read_text() == str(first.step - 1)


def test_a_stop_that_comes_before_the_ranks_begin_is_heard(train):
    run = train("slowly", steps=FOREVER)
    run.stop()
    assert run.wait(LONG_S).state == "stopped"


@pytest.mark.slow
def test_a_rank_s_exception_arrives_with_its_layer_and_traceback(cluster, train):
    run = train("last_rank_raises")
    with pytest.raises(RankError) as caught:
        run.wait(LONG_S)
    error = caught.value
    assert (error.rank, error.layer, error.kind) == (1, "fc1", "LayerError")
    assert error.text == "no room on this rank"
    assert 'raise LayerError("no room on this rank")' in error.remote_traceback
    assert str(error).startswith("rank 1 failed in layer 'fc1': LayerError: no room on this rank")
    assert run.state == "failed"
    assert len(run.rows) == 2
    assert cluster.dead == ()
    assert train("train").wait(LONG_S).state == "finished"


def test_the_first_failure_is_told_and_the_others_counted(train):
    with pytest.raises(RankError, match="1 other rank failed after it: ValueError on rank"):
        train("all_raise").wait(LONG_S)


def test_a_loss_that_is_no_number_stops_the_run(train):
    run = train("diverges")
    with pytest.raises(Diverged, match=r"the loss became nan at step 1, first in layer 'fc0'"):
        run.wait(LONG_S)
    assert run.state == "failed"


def times_of_first_step(run):
    return sum(row["step"] == row["rank"] == 0 for row in run.rows[:])


@pytest.mark.slow
def test_a_run_whose_engine_died_goes_on_by_itself(cluster, train):
    before = cluster.pids
    run = train("slowly", steps=FOREVER)
    running(run)
    os.kill(before[1], signal.SIGKILL)
    again = until(lambda: run.notes and times_of_first_step(run) == 2, LONG_S)
    assert again, run
    assert "rank 1" in run.notes[0]
    assert f"(pid {before[1]}) died: its process was ended by SIGKILL" in run.notes[0]
    assert until(lambda: run.state == "running", LONG_S)
    run.stop()
    assert run.wait(LONG_S).state == "stopped"
    assert cluster.dead == ()
    assert cluster.pids[0] == before[0]
    assert cluster.pids[1] != before[1]


@pytest.mark.slow
def test_a_rank_that_cannot_be_interrupted_is_ended(cluster, train):
    with pytest.raises(RankError, match="rank 0 could not be interrupted and had to be ended"):
        train("first_rank_ignores").wait(LONG_S)
    assert train("train").wait(LONG_S).state == "finished"


@pytest.mark.slow
def test_a_run_waits_for_free_engines(cluster, train):
    one = train("slowly", steps=FOREVER, ranks=1)
    other = train("slowly", steps=FOREVER, ranks=1)
    running(one)
    running(other)
    third = train("train", ranks=1)
    assert until(lambda: third.state == "queued", LONG_S), third
    assert third.reason
    assert "queued" in repr(third)
    with pytest.raises(ClusterError, match=r"1 engines are needed and 0 of 2 are free"):
        cluster.verify(Plan.data_parallel(mlp(4, 4), 1))
    fourth = train("train", ranks=1)
    fourth.stop()
    assert fourth.wait(LONG_S).state == "stopped"
    assert fourth.outcomes == ()
    one.stop()
    assert third.wait(LONG_S).state == "finished"
    assert one.wait(LONG_S).state == "stopped"
    assert other.state == "running"
    other.stop()
    other.wait(LONG_S)


def test_a_plan_for_more_ranks_than_engines(cluster):
    plan = Plan.data_parallel(mlp(4, 4), 3)
    with pytest.raises(ClusterError, match=r"for 3 ranks, .* has 2 engines: start Cluster\(3\)"):
        cluster.train(experiment(plan))
    with pytest.raises(ClusterError, match=r"for 3 ranks, .* has 2 engines: start Cluster\(3\)"):
        cluster.verify(plan)


def test_arguments_of_the_wrong_kind(cluster):
    plan = Plan.data_parallel(mlp(4, 4), 2)
    with pytest.raises(TypeError, match="takes an Experiment, got Plan"):
        cluster.train(plan)
    with pytest.raises(TypeError, match="and an Experiment, got Plan for experiment"):
        cluster.call("module:function", plan)
    with pytest.raises(TypeError, match="got function for task"):
        cluster.call(until, None)
    with pytest.raises(TypeError, match="takes a Plan or an Experiment, got Graph"):
        cluster.verify(plan.graph)
    with pytest.raises(ValueError, match="'fp64' or 'fp32', got 'bf16'"):
        cluster.verify(plan, precision="bf16")
    with pytest.raises(CheckpointError, match="nowhere is no complete checkpoint"):
        cluster.train(experiment(plan), resume="nowhere")


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "4"])
def test_a_cluster_has_a_positive_number_of_engines(n, tmp_path):
    with pytest.raises(ValueError, match="positive number of engines"):
        Cluster(n, directory=tmp_path)


@pytest.mark.parametrize("name", ["timeout", "lease", "suspicion"])
def test_it_waits_for_a_positive_number_of_seconds(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name} must be a positive number of seconds, got 0"):
        Cluster(1, directory=tmp_path, **{name: 0})


def test_messages_are_counted_and_small(cluster, train):
    before = cluster.sent
    run = train("in_a_hurry", steps=1000).wait(LONG_S)
    ledger = cluster.link.store.ledger
    # Rows and answers are files: what comes back says only that a call has returned.
    assert until(lambda: ledger(run.id)["received"].messages == 2, LONG_S)
    sent, received = ledger(run.id)["sent"], ledger(run.id)["received"]
    assert (sent.messages, received.messages) == (2, 2)
    assert 0 < sent.bytes < 20_000
    assert 0 < received.bytes < 1000
    assert cluster.sent.messages >= before.messages + 2


def test_a_message_above_64_kib_is_refused(cluster, train):
    run = train("train").wait(LONG_S)
    with pytest.raises(ControlMessageTooLarge, match="at most 65,536"):
        cluster.call("nowhere:nothing", run.experiment, blob=os.urandom(65_536))
    assert cluster.occupied == {}


def test_an_answer_above_64_kib_is_refused_and_rows_are_kept(train):
    run = train("answers_too_much")
    with pytest.raises(RankError, match="an answer of"):
        run.wait(LONG_S)
    assert len(run.rows) >= 1  # of the rank that answered; the other may not have come so far


def test_engines_are_placed_as_the_cluster_says(cluster, train):
    run = train("tells_its_place").wait(LONG_S)
    for device, outcome in zip(cluster.devices, run.outcomes, strict=True):
        place = json.loads(outcome.message)
        assert place["environment"]["CUDA_VISIBLE_DEVICES"] == device.gpu
        assert place["environment"]["OMP_NUM_THREADS"] == str(device.threads)
        assert place["environment"]["GLOO_SOCKET_IFNAME"].startswith("lo")
        assert place["threads"] == device.threads
        assert place["cores"] in (None, sorted(device.cores))


def test_a_cluster_shows_its_engines(cluster):
    assert repr(cluster).startswith("<Cluster of 2 engines on ")
    html = cluster._repr_html_()
    assert html.count("<tr>") == 3
    for pid in cluster.pids:
        assert str(pid) in html
    assert "idle" in html


@pytest.mark.slow
def test_a_dead_supervisor_is_told_and_a_restart_goes_on(cluster, train):
    run = train("slowly", steps=FOREVER)
    running(run)
    (supervisor,) = leftovers.of_kind(cluster.folder, "workbench.supervisor")
    supervisor.kill()
    with pytest.raises(
        ClusterError, match=r"supervisor of cluster .* has ended.*cluster.restart\(\)"
    ):
        run.wait(LONG_S)
    with pytest.raises(ClusterError, match=r"has ended, .* cluster.restart\(\)"):
        train("train")
    before = cluster.pids
    cluster.restart()
    assert not set(cluster.pids) & set(before)
    followed = cluster.jobs[run.id]
    running(followed)
    followed.stop()
    assert followed.wait(LONG_S).state == "stopped"
    assert train("train").wait(LONG_S).state == "finished"


@pytest.mark.slow
def test_who_attaches_while_the_supervisor_ends_starts_another(cluster, monkeypatch):
    """One that was killed may still be there as it is looked for."""
    (found,) = leftovers.of_kind(cluster.folder, "workbench.supervisor")
    found.kill()
    until(lambda: supervisor_of(cluster.folder) is None, LONG_S)
    seen = iter([ProcessIdentity.here()])
    monkeypatch.setattr(
        "workbench.client.engines.supervisor.supervisor_of",
        lambda folder: next(seen, None) or supervisor_of(folder),
    )
    before = cluster.pids
    assert not set(Cluster.attach(cluster.folder).pids) & set(before)
    assert next(seen, None) is None


def test_a_stopped_cluster_says_so(cluster, train):
    """The last of this module, which needs the cluster no more."""
    run = train("slowly", steps=FOREVER)
    running(run)
    cluster.stop()
    assert run.state == "stopped"
    assert run.checkpoint is not None
    assert run.checkpoint.exists()
    assert not cluster.folder.exists()
    assert not leftovers.of(cluster.folder)
    assert repr(cluster) == "<Cluster of 2 engines: stopped>"
    assert "stopped" in cluster._repr_html_()
    with pytest.raises(ClusterError, match="was stopped"):
        train("train")
    cluster.stop()
