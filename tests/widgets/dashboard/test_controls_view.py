"""Controls, events, timelines and several runs, in Chromium; `stage.py` plays the kernel."""

import pytest

from tests.browser import chromium
from tests.widgets.dashboard.fake import FakeRun, traced
from workbench.store.errors import ClusterError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed"),
]

SAYS = "(text) => document.querySelector('.wb-outcome').textContent.includes(text)"


@pytest.fixture
def running(stage):
    run = FakeRun()
    shown = stage(run)
    run.feed(0, 9)
    shown.drawn(done="10")
    return run, shown


def test_pause_and_resume(running, page):
    run, shown = running
    assert page.get_by_role("button", name="Resume").is_disabled()
    page.get_by_role("button", name="Pause").click()
    shown.drawn(state="paused")
    assert page.get_by_role("button", name="Pause").is_disabled()
    assert "holds no engines" in page.locator("[data-do=kill]").get_attribute("title")
    page.get_by_role("button", name="Resume").click()
    shown.drawn(state="running")
    shown.until(SAYS, "Goes on from the newest checkpoint")
    assert run.asked == [("pause",), ("resume",)]


def test_a_checkpoint_and_another_learning_rate(running, page):
    run, shown = running
    page.get_by_role("button", name="Checkpoint now").click()
    shown.until(SAYS, "Checkpoint after step 58")
    rate = page.get_by_label("learning rate")
    assert rate.input_value() == "0.1"
    rate.fill("0.025")
    rate.press("Enter")
    shown.until(SAYS, "Learning rate 0.025 since step 57.")
    assert run.asked == [("checkpoint",), ("lr", 0.025)]
    shown.until("() => document.querySelector('.wb-facts').textContent.includes('rate 0.025')")


def test_faults_go_to_the_engine_of_the_rank(running, page):
    run, shown = running
    page.get_by_text("Faults on purpose").click()
    page.get_by_label("rank to disturb").select_option("2")
    for name, words in (
        ("Kill", "was killed"),
        ("Hold", "stands still"),
        ("Release", "as fast as it can"),
    ):
        page.get_by_role("button", name=name).click()
        shown.until(SAYS, words)
    page.get_by_label("times slower").fill("3")
    page.get_by_role("button", name="Slow down").click()
    shown.until(SAYS, "3 times slower")
    assert run.cluster.done == [
        ("kill", 3),
        ("pause", 3),
        ("slow", 3, 1.0),
        ("unpause", 3),
        ("slow", 3, 3.0),
    ]
    shown.until(
        "(text) => [...document.querySelectorAll('.wb-value')].some((v) => v.textContent === text)",
        "3.0× slower",
    )


def test_what_fails_is_said_with_what_to_do(running, page):
    run, shown = running
    run.pause = lambda: 1 / 0
    page.get_by_role("button", name="Pause").click()
    shown.until(SAYS, "✕ division by zero run.pause() in a cell says more.")
    assert page.locator(".wb-outcome").get_attribute("role") == "status"
    assert page.get_by_role("button", name="Pause").is_enabled()


def test_events_are_text_and_the_newest_is_first(running, page):
    run, shown = running
    run.notes.append("a <b>note</b>")
    run.happen("engine 2 died", "warning")
    shown.until("() => document.querySelectorAll('.wb-events time').length === 2")
    texts = page.get_by_role("log").inner_text().splitlines()
    assert any("a <b>note</b>" in text for text in texts)
    assert page.locator(".wb-events li.wb-warning").inner_text().endswith("▲ engine 2 died")


def test_a_step_in_time_is_read_by_mouse_and_by_keys(stage, page):
    run = FakeRun(world_size=12)
    run.experiment.trace_every = 10
    run.traced = traced(12)
    run.feed(0, 9)
    shown = stage(run)
    shown.drawn(done="10")
    canvas = page.locator(".wb-timeline canvas")
    assert canvas.get_attribute("data-spans") == "24"  # of the first eight ranks
    assert "measured 200 ms in step 9" in canvas.get_attribute("aria-label")
    tip = page.locator(".wb-tip")
    box = canvas.bounding_box()
    canvas.hover(position={"x": 72 + 0.1 * (box["width"] - 72), "y": 18 + 18 + 5})
    assert "Measured, rank 0, compute: forward conv, 60.0 ms from 0 ms on" in tip.inner_text()
    page.mouse.move(1, 1)
    canvas.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert (
        "rank 0, communication: collective all_reduce gradients (step), 50.0 ms" in tip.inner_text()
    )
    assert "1.00 MiB received" in tip.inner_text()
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    before = float(canvas.get_attribute("data-to"))
    page.keyboard.press("+")
    assert (
        float(canvas.get_attribute("data-to")) - float(canvas.get_attribute("data-from")) < before
    )
    page.get_by_role("button", name="later").click()
    page.get_by_role("button", name="earlier").click()
    page.get_by_role("button", name="zoom in").click()
    page.get_by_role("button", name="zoom out").click()
    page.get_by_role("button", name="show the whole step").click()
    assert canvas.get_attribute("data-from") == "0.0000"
    box = canvas.bounding_box()  # the page may have scrolled
    page.mouse.move(box["x"] + 200, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 40)
    page.mouse.up()
    assert float(canvas.get_attribute("data-from")) > 0.05
    page.keyboard.press("0")  # a press of the mouse gives the keys to the canvas
    page.get_by_label("ranks in the timeline").select_option("8")
    shown.until("() => document.querySelector('.wb-timeline canvas').dataset.spans === '12'")


def test_a_run_that_is_not_traced_says_how_it_would_be(running, page):
    assert "experiment.replace(trace_every=5)" in page.inner_text(".wb-missing")
    assert page.locator(".wb-timeline canvas").is_hidden()
    assert page.get_by_role("button", name="zoom in").is_hidden()


def test_several_runs_are_overlaid_and_one_is_chosen(stage, page):
    runs = {"first": FakeRun(world_size=2), "second": FakeRun(world_size=3)}
    shown = stage(runs)
    runs["first"].feed(0, 19)
    runs["second"].feed(0, 9)
    shown.drawn(run="first", done="20")
    legend = page.locator(".wb-panel >> nth=1 >> .wb-legend").inner_text()
    assert "first" in legend
    assert "second" in legend
    page.get_by_label("run shown in detail").select_option("second")
    shown.drawn(run="second", done="10")
    assert page.locator(".wb-bars >> nth=0 >> [role=listitem]").count() == 3
    page.get_by_role("button", name="Pause").click()
    shown.drawn(run="second", state="paused")
    assert (runs["first"].asked, runs["second"].asked) == ([], [("pause",)])


def test_a_kernel_that_is_gone_leaves_the_last_picture_and_says_so(running, page):
    _, shown = running
    page.clock.install()
    page.evaluate("window.sent.length = 0")
    page.get_by_role("button", name="Checkpoint now").click()
    page.clock.fast_forward(9000)
    quiet = page.locator(".wb-quiet")
    quiet.wait_for(state="visible")
    assert "The kernel has not answered since" in quiet.inner_text()
    assert "Cluster.attach" in quiet.inner_text()
    assert page.get_attribute(".wb-dashboard", "data-points") == "10"
    shown.pass_on()  # it was only busy
    quiet.wait_for(state="hidden")


def test_a_cluster_that_is_gone_is_followed_again_once_it_is_back(running, page):
    run, shown = running
    run.end(
        "failed", error=ClusterError("its engines have ended; cluster.restart() starts new ones")
    )
    shown.drawn(state="failed")
    assert "follows the job again" in page.get_by_role("alert").first.inner_text()
    again = FakeRun()
    again.feed(0, 14)
    run.cluster.jobs[7] = again
    shown.until("() => document.querySelector('.wb-dashboard').dataset.done === '15'")
    assert page.get_attribute(".wb-dashboard", "data-state") == "running"
    assert page.locator(".wb-alert:visible").count() == 0
