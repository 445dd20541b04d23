"""What a dashboard does to runs and their engines, and what it says of it; without a browser."""

import pytest

from tests.widgets.dashboard.fake import FakeRun
from workbench.store.errors import ClusterError
from workbench.widgets.dashboard import Dashboard, commands


def asked(dashboard, name, **content):
    """As a view asks; what it is told in the end."""
    dashboard._handle_custom_msg({"type": "do", "name": name, **content}, [])
    assert dashboard.settle()
    return dashboard._outcome["of"][name]


@pytest.mark.parametrize(
    ("name", "content", "done"),
    [
        ("pause", {}, [("pause",)]),
        ("resume", {}, [("resume",)]),
        ("checkpoint", {}, [("checkpoint",)]),
        ("lr", {"value": "0.05"}, [("lr", 0.05)]),
    ],
)
def test_controls_ask_the_run(show, views, name, content, done):
    run = FakeRun()
    run.feed(0, 9)
    dashboard = show(run)
    told = asked(dashboard, name, **content)
    assert (told["state"], run.asked) == ("done", done)
    assert dashboard.events == []  # the run itself notes them


def test_stop_is_said_until_the_run_ends(show, views):
    run = FakeRun()
    dashboard = show(run)
    run.feed(0, 9)
    asked(dashboard, "stop")
    assert run.stops == 1
    views.wait(stopping=True)
    run.end("stopped")
    said, _ = views.wait(state="stopped")
    assert not said["stopping"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("lr", {"value": "fast"}, "a learning rate is a positive number, such as 0.05; got 'fast'"),
        ("lr", {"value": -1}, "positive"),
        ("slow", {"rank": 1, "factor": "nan"}, "a factor is a positive number"),
        ("kill", {"rank": 4}, "no rank 4: there are 0 to 3"),
        ("kill", {"rank": True}, "no rank True"),
        ("kill", {}, "no rank None"),
        ("explode", {}, "a dashboard has no control 'explode'; there are stop, pause"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(show, views, name, content, reason):
    run = FakeRun()
    run.feed(0, 9)
    dashboard = show(run)
    told = asked(dashboard, name, **content)
    assert told["state"] == "failed"
    assert reason in told["text"]
    assert (run.asked, run.cluster.done) == ([], [])
    assert reason in dashboard.events[-1]


def test_what_a_run_refuses_is_said(show, views):
    run = FakeRun()
    run.stop = lambda: 1 / 0
    told = asked(show(run), "stop")
    assert (told["state"], told["text"]) == ("failed", "division by zero")
    assert told["advice"]


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        ("queued", {"stop", "pause", "fault"}),
        ("running", {"stop", "pause", "checkpoint", "lr", "fault"}),
        ("paused", {"stop", "resume"}),
        ("stopped", {"resume"}),
        ("failed", {"resume"}),
        ("finished", set()),
    ],
)
def test_what_can_be_used_when(state, usable):
    can = commands.possible(FakeRun(), state)
    assert {name for name, reason in can.items() if not reason} == usable


def test_without_a_cluster_there_are_no_faults():
    run = FakeRun()
    run.cluster = None
    assert "attached" in commands.possible(run, "running")["fault"]


def test_engines_that_were_disturbed_are_marked(show, views):
    run = FakeRun(world_size=2)
    dashboard = show(run)
    run.feed(0, 1)
    asked(dashboard, "slow", rank=1, factor=2.5)
    content, _ = views.wait_for("conditions", lambda found: any(found))
    assert content["conditions"] == ["", "2.5× slower"]
    assert dashboard.events == ["Rank 1 (engine 2) is 2.5 times slower."]


def test_a_run_that_cannot_be_read_says_so(show, views):
    run = FakeRun()
    show(run)

    class Broken(FakeRun):
        @property
        def evaluation(self):
            raise OSError("disk gone")

        @evaluation.setter
        def evaluation(self, value):
            pass

    run.__class__ = Broken
    run.feed(0, 1)
    content, _ = views.wait_for("outcome", bool)
    assert "disk gone" in content["outcome"]["of"]["dashboard"]["text"]


@pytest.mark.slow
def test_a_job_whose_cluster_came_back_is_followed_again(show, views):
    run = FakeRun()
    dashboard = show(run)
    run.feed(0, 9)
    run.end("failed", error=ClusterError("the engines ended; cluster.restart() starts new ones"))
    said, _ = views.wait(state="failed")
    assert "follows the job again" in said["advice"]
    again = FakeRun()
    again.feed(0, 19)
    run.cluster.jobs[7] = again
    views.wait(state="running", done=20)
    assert dashboard.run is again
    assert run.callbacks == []


def test_a_run_that_failed_by_itself_is_left_alone(show, views):
    run = FakeRun()
    run.cluster.jobs[7] = FakeRun()
    run.feed(0, 9)
    run.end("failed", error=RuntimeError("no memory"))
    assert show(run).run is run


def test_closing_while_something_is_under_way_is_safe(views):
    run = FakeRun()
    dashboard = Dashboard(run)
    dashboard.do("pause")
    dashboard.close()
