"""The table of jobs, without a browser: what it reads, says, and has done."""

import time
from types import SimpleNamespace

import pytest
import traitlets

from tests.scheduler.values import job
from tests.widgets.tables.kit import FakeCluster
from workbench.widgets.tables import ClusterView, JobTable
from workbench.widgets.tables.job_table import JobCache


def rows(table):
    table.look()
    return {row["id"]: row for row in table._shown["rows"]}


def test_jobs_appear_and_change_as_the_store_does(cluster, board):
    table = board(JobTable, cluster)
    assert table._shown["rows"] == []
    first = cluster.submit(name="vgg11")
    cluster.run(first, (0,), step=25)
    second = cluster.submit(name="alexnet", tag="sweep-1")
    cluster.submit(kind="call")
    assert [rows(table)[n]["state"] for n in (first, second)] == ["running", "queued"]
    assert len(table.jobs) == 2  # calls are none
    assert rows(table)[first]["when"] == "ends"
    assert table.counts == {"running": 1, "queued": 1}
    cluster.link.store.release(first, "finished")
    assert rows(table)[first]["state"] == "finished"
    cluster.link.store.update(first, state="queued")
    assert rows(table)[first]["state"] == "queued"


def test_the_thread_finds_news_by_itself(cluster, board):
    table = board(JobTable, cluster)
    heard = []
    table.observe(lambda change: heard.append(change["new"]), "counts")
    cluster.submit()
    deadline = time.monotonic() + 60
    while not heard and time.monotonic() < deadline:
        time.sleep(0.01)
    assert heard == [{"queued": 1}]


def test_nothing_is_read_without_news(cluster, board):
    cluster.submit()
    table = board(JobTable, cluster)
    sent = []
    table.send = lambda content, buffers=(): sent.append(content)
    table._watch.look()
    sent.clear()
    cluster.link.store.jobs = None  # and so nothing can be read
    table._watch.look()
    assert sent == []
    assert table.gone == ""


def test_jobs_that_have_ended_are_read_once(cluster):
    ended, other = cluster.submit(), cluster.submit()
    cluster.link.store.release(ended, "cancelled")
    ledger = JobCache(cluster.link.store)
    assert [each.state for each in ledger.read()] == ["cancelled", "queued"]
    asked = []
    jobs = cluster.link.store.jobs
    cluster.link.store.jobs = lambda **which: asked.append(which) or jobs(**which)
    cluster.link.store.release(other, "stopped")
    assert [each.state for each in ledger.read()] == ["cancelled", "stopped"]
    assert asked[0] == {"after": other}
    assert "states" in asked[1]


@pytest.mark.parametrize(
    ("action", "state"),
    [("pause", "paused"), ("stop", "stopped"), ("cancel", "cancelled")],
)
def test_buttons_ask_the_server(cluster, board, action, state):
    number = cluster.submit()
    table = board(JobTable, cluster)
    table._receive(table, {"type": "job", "job": number, "action": action}, [])
    assert table.settle()
    assert rows(table)[number]["state"] == state
    table.ask_of(number, "resume")
    assert table.settle()
    assert rows(table)[number]["state"] == "queued"


def test_priorities_go_up_and_down(cluster, board):
    number = cluster.submit()
    table = board(JobTable, cluster)
    for action, priority in (("up", 1), ("up", 2), ("down", 1)):
        table.ask_of(number, action)
        assert table.settle()
        assert rows(table)[number]["priority"] == priority


def test_what_the_server_refuses_is_said_in_the_row(cluster, board):
    number = cluster.submit()
    table = board(JobTable, cluster)
    cluster.jobs.refuses = "the job server does not answer"
    table.ask_of(number, "pause")
    assert table.settle()
    assert rows(table)[number]["told"] == "the job server does not answer"
    cluster.jobs.refuses = ""
    table.ask_of(number, "pause")
    assert table.settle()
    assert rows(table)[number]["told"] == ""


def test_what_cannot_be_asked_says_why(cluster, board):
    table = board(JobTable, cluster)
    with pytest.raises(ValueError, match="there is no job 7"):
        table.ask_of(7, "pause")
    with pytest.raises(ValueError, match="can be asked to pause"):
        table.ask_of(7, "explode")
    table._receive(table, {"type": "job", "job": 7, "action": "pause"}, [])
    assert table._shown["error"] == "there is no job 7"
    number = cluster.submit(state="finished")
    rows(table)
    with pytest.raises(ValueError, match="job 1 cannot be asked to resume: all of its steps"):
        table.ask_of(number, "resume")


@pytest.mark.parametrize("kind", [JobTable, ClusterView])
def test_a_cluster_that_is_gone_is_said_and_the_last_picture_stays(cluster, board, tmp_path, kind):
    cluster.submit(name="vgg11")
    table = board(kind, cluster)
    kept = table._shown["rows"]
    cluster.link.is_kept = False
    table.look()
    assert "cluster.restart()" in table.gone
    assert "cluster.restart()" in table.still()
    assert table._shown["rows"] == kept
    cluster.link.is_kept = True
    table.look()
    assert table.gone == ""
    cluster.is_stopped = True
    table.look()
    assert "was stopped" in table.gone
    (tmp_path / "other").mkdir()
    other = FakeCluster(tmp_path / "other", engines=2, name="other")
    table.cluster = other
    assert table.gone == ""
    assert table._shown["cluster"] == "other"


def test_filter_and_page_are_attributes(cluster, board):
    for letter in "abcde":
        cluster.submit(name=f"net-{letter}")
    table = board(JobTable, cluster, page_size=2)
    table.page = 3
    assert [row["name"] for row in table._shown["rows"]] == ["net-e"]
    table._receive(table, {"type": "filter", "value": "NET-B queued"}, [])
    assert (table.page, table.filter) == (1, "NET-B queued")
    assert [row["name"] for row in table._shown["rows"]] == ["net-b"]
    with pytest.raises(traitlets.TraitError):
        table.page_size = 0


def test_ten_thousand_jobs_are_a_small_message(board):
    jobs = tuple(job(n, state="finished", ended_at=float(n), steps=9) for n in range(1, 10_001))

    def found(after=0, states=None):
        return () if after or states else jobs

    store = SimpleNamespace(jobs=found, changed=lambda: False)
    link = SimpleNamespace(store=store, is_kept=True)
    cluster = SimpleNamespace(name="big", is_stopped=False, link=link, jobs=None)
    table = board(JobTable, cluster)
    assert table.counts == {"finished": 10_000}
    assert (len(table._shown["rows"]), table._shown["pages"]) == (20, 500)
    assert table._shown["rows"][0]["id"] == 10_000


def test_a_still_picture_holds_names_as_text(cluster, board):
    cluster.submit(name="<script>alert(1)</script>" + "x" * 200)
    table = board(JobTable, cluster)
    still = table._repr_mimebundle_()[0]["text/html"]
    assert "<script>" not in still
    assert "&lt;script&gt;" in still
    assert "1 queued" in still
    assert repr(table) == "<JobTable of cluster 'bench': 1 queued>"


def test_engines_with_their_jobs(cluster, board):
    number = cluster.submit(name="vgg11", engines=2)
    cluster.run(number, (2, 0))
    cluster.link.store.set_engine(3, state="dead", death="was ended by SIGKILL")
    view = board(ClusterView, cluster)
    engines = {row["label"]: row for row in view._shown["rows"]}
    assert list(engines) == ["0", "1", "2", "3", "assistant"]
    assert (engines["0"]["job"], engines["0"]["rank"]) == ("1: vgg11", 1)
    assert (engines["2"]["rank"], engines["1"]["rank"]) == (0, None)
    assert view.states == ["busy", "idle", "busy", "dead"]
    assert engines["0"]["device"] == "core 0"
    assert engines["3"]["death"] == "was ended by SIGKILL"
    assert repr(view) == "<ClusterView of 'bench': 4 engines: 2 busy, 1 idle, 1 dead>"
    assert "50 %" in view.still()


@pytest.mark.parametrize("kind", [JobTable, ClusterView])
def test_only_clusters_have_tables(kind, cluster, board):
    with pytest.raises(TypeError, match=r"takes a wb.Cluster, got int"):
        kind(4)
    with pytest.raises(TypeError, match=r"wb.Cluster.attach"):
        board(kind, cluster).cluster = "bench"
