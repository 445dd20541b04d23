import queue
import threading

import numpy as np
import pytest
from ipywidgets import Widget

from tests.widgets.dashboard.fake import FakeRun, row
from tests.widgets.dashboard.views import PATIENCE_S, unpacked
from workbench.client.run.rows import Rows
from workbench.store.run_folder import add_evaluation
from workbench.widgets.base.widget import asset
from workbench.widgets.dashboard import Dashboard
from workbench.widgets.dashboard.series import FIELDS


def test_new_steps_reach_the_views(show, views):
    run = FakeRun(world_size=2)
    dashboard = show(run)
    run.feed(0, 4)
    _, parts = views.wait(done=5)
    assert parts["points 0"].reshape(-1, 4)[:, 0].tolist() == [0, 1, 2, 3, 4]
    ranks = parts["ranks"].reshape(2, len(FIELDS))
    assert ranks[1, 0] == run.rows[-1]["tensor_bytes"]
    run.feed(5, 5)
    said, parts = views.wait(done=6)
    assert said["start"] == 5
    assert parts["points 0"][0] == 5
    assert dashboard.status.state == dashboard.state == "running"
    assert dashboard.series["step"] == [0, 1, 2, 3, 4, 5]
    assert dashboard.ranks[0].peak_bytes == run.rows[0]["peak_bytes"]


def test_a_view_finds_the_run_as_it_was_when_the_way_to_it_opened(show, views, monkeypatch):
    """A notebook's page may begin before any later message is there."""
    opened, really = [], Widget.open

    def opening(widget):
        if isinstance(widget, Dashboard):  # it has a layout, which is one, too
            opened.append(widget.get_state())
        really(widget)

    monkeypatch.setattr(Widget, "open", opening)
    run = FakeRun(world_size=2)
    run.feed(0, 4)
    show(run)
    (state,) = opened
    assert unpacked(state["_content"], [state["_numbers"]])["points 0"].size == 5 * 4


def test_a_metric_of_one_s_own_stands_beside_the_loss(show, tmp_path):
    run = FakeRun(world_size=1, steps=4)
    run.experiment.figures, run.directory = ("f1", "miou"), tmp_path
    add_evaluation(tmp_path, 2, {"loss": 1.0, "f1": 0.25, "miou": 9.0})
    run.feed(0, 3)
    run.end(f1=0.75, miou=9.0)
    dashboard = show(run)
    assert dashboard.series["accuracy"][1::2] == [0.25, 0.75]
    assert str(dashboard.status).endswith("test f1 0.750")
    assert "test f1" in dashboard.pictures()[0]
    assert dashboard.status.as_dict()["metric"] == "f1"


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_a_run_that_has_ended_is_shown_whole(show, views, state):
    run = FakeRun()
    run.feed(0, 79)
    run.end(state, accuracy=0.972)
    dashboard = show(run)
    views.wait(ended=True)
    assert (dashboard.status.state, dashboard.status.done) == (state, 80)
    assert dashboard.series["accuracy"][-1] == 0.972
    kept = unpacked(dashboard._content, [dashboard._numbers])
    assert kept["points 0"].reshape(-1, 4).shape == (80, 4)
    assert dashboard._content["runs"][0]["status"]["ended"]


def test_a_run_that_ended_within_a_step_shows_what_is_known_of_it(show, views):
    run = FakeRun(world_size=2)
    run.feed(0, 3)
    run.push([row(4, 0)])
    run.end("failed", error=RuntimeError("rank 1 died"))
    assert show(run).series["step"] == [0, 1, 2, 3, 4]


def test_each_row_counts_once(show, views):
    run = FakeRun(world_size=1)
    dashboard = show(run)
    for step, seconds in enumerate((1.0, 2.0, 6.0)):
        run.feed(step, step, compute_s=seconds)
        views.wait(done=step + 1)
    assert dashboard.ranks[0].compute_s == 3.0


def test_no_news_no_messages(show, views):
    run = FakeRun()
    show(run)
    run.feed(0, 9)
    views.wait(done=10)
    while not views.messages.empty():  # one notification may be answered twice
        views.messages.get()
    with pytest.raises(queue.Empty):
        [views.messages.get(timeout=0.15) for _ in range(3)]


def test_what_a_notebook_keeps_is_the_end(show, views, monkeypatch):
    kept = queue.Queue()

    class Handle:
        def update(self, data, **_options):
            kept.put(data["text/plain"])

    monkeypatch.setattr("workbench.widgets.base.widget.display", lambda *_, **__: Handle())
    run = FakeRun()
    dashboard = show(run)
    dashboard._ipython_display_()
    run.feed(0, 79)
    run.end()
    still = kept.get(timeout=PATIENCE_S)
    assert still == repr(dashboard)
    assert still.startswith("<Dashboard: finished, 80 of 80 steps")
    assert kept.empty()
    assert len(unpacked(dashboard._content, [dashboard._numbers])["points 0"]) == 4 * 80
    assert dashboard._content["runs"][0]["status"]["done"] == 80


def test_a_run_that_is_resumed_is_followed_again(show, views):
    run = FakeRun()
    dashboard = show(run)
    run.feed(0, 4)
    run.end("stopped")
    views.wait(state="stopped", done=5)
    run.feed(3, 6)  # from the checkpoint before step 3 on
    said, parts = views.wait(state="running", done=7)
    assert not said["ended"]
    assert parts["points 0"].reshape(-1, 4)[-1, 0] == 6
    assert dashboard.series["step"] == [0, 1, 2, 3, 4, 5, 6]
    run.end()
    views.wait(state="finished")


def test_a_run_that_began_earlier_is_shown_from_its_start(show, views):
    run = FakeRun()
    run.feed(0, 9)
    dashboard = show(run)
    assert len(dashboard.series["step"]) == 10


def test_messages_are_few_whatever_the_step_rate_and_the_last_state_arrives(show, views):
    run = FakeRun(world_size=1, steps=3000)
    dashboard = show(run, interval_s=0.05)
    for step in range(3000):
        run.feed(step, step)
    run.end()
    said, _ = views.wait(state="finished")
    assert said["done"] == 3000
    assert (np.diff(views.times) > 0.04).all()
    assert len(dashboard.series["step"]) <= 1024


def test_the_thread_that_notifies_never_reads(show, views):
    """A run may hold its own lock while it notifies; reading there could wait for ever."""
    readers = set()

    class WatchedRun(FakeRun):
        @property
        def rows(self):
            readers.add(threading.current_thread().name)
            return self.__dict__.setdefault("kept", Rows())

        @rows.setter
        def rows(self, value):
            pass

    run = WatchedRun()
    show(run)
    kept = run.rows
    readers.clear()
    monitor = threading.Thread(target=lambda: run.callbacks[0]([]), name="monitor")
    monitor.start()
    monitor.join(PATIENCE_S)
    run.reason = "2 engines are needed, 1 is free"
    run.callbacks[0]([])
    views.wait(reason=run.reason)
    assert len(kept) == 0
    assert readers <= {"dashboard"}


def test_a_view_that_comes_late_asks_for_everything(show, views):
    run = FakeRun()
    dashboard = show(run)
    run.feed(0, 9)
    views.wait(done=10)
    dashboard._handle_custom_msg({"type": "hello"}, [])
    said, parts = views.wait(done=10)
    while said["start"] != 0:
        said, parts = views.wait(done=10)
    assert parts["points 0"].size == 40


def test_a_failure_arrives_with_its_message(show, views):
    run = FakeRun()
    show(run)
    run.feed(0, 9)
    run.end("failed", error=RuntimeError("rank 1, layer classifier.0: out of memory"))
    said, _ = views.wait(state="failed")
    assert said["error"] == "rank 1, layer classifier.0: out of memory"
    assert "run.metrics" in said["advice"]


def test_without_widgets_a_picture_and_a_line_are_left(show, views):
    run = FakeRun()
    run.feed(0, 79)
    run.end(accuracy=0.972)
    data, _ = show(run)._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    assert "data:image/svg+xml;base64," in data["text/html"]
    assert data["text/plain"] == (
        "<Dashboard: finished, 80 of 80 steps, 0:16 elapsed, test accuracy 97.2 %>"
    )


def test_closing_lets_go_of_the_run(show, views):
    run = FakeRun()
    dashboard = show(run)
    dashboard.close()
    dashboard.close()
    assert run.callbacks == []


def test_closing_at_the_moment_of_the_end_is_safe(views):
    """pytest makes an exception of the dashboard's thread a failure."""
    for _ in range(100):
        run = FakeRun(world_size=1)
        dashboard = Dashboard(run, interval_s=0)
        run.feed(0, 1)
        run.end()
        dashboard.close()
        assert not dashboard._thread.is_alive()


def test_a_missing_bundle_says_how_to_make_it(monkeypatch, tmp_path):
    monkeypatch.setattr("workbench.widgets.base.widget.BUNDLE", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"run `python env/bundle\.py`"):
        asset("nothing.js")
