"""The browser's half, in Chromium on a bare page; `stage.py` plays the kernel."""

import re

import pytest

from tests.browser import chromium
from tests.widgets.dashboard.fake import FakeRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed"),
]


OUT_OF_SIGHT = """new Promise((done) => new IntersectionObserver((entries) => {
  if (!entries.at(-1).isIntersecting) done();
}).observe(document.querySelector('.wb-dashboard')))"""
TWO_FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def color(page, selector, name="color"):
    return page.eval_on_selector(selector, f"e => getComputedStyle(e).getPropertyValue('{name}')")


def ink(page, panel):
    """How many pixels of a chart are drawn in the curve's color."""
    return page.evaluate(
        """([panel, name]) => {
      const canvas = document.querySelectorAll('.wb-plot canvas')[panel];
      const probe = document.createElement('span');
      const root = document.querySelector('.wb-dashboard');
      probe.style.color = getComputedStyle(root).getPropertyValue(name);
      root.append(probe);
      const [r, g, b] = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
      probe.remove();
      const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      let count = 0;
      for (let i = 0; i < data.length; i += 4)
        if (data[i] === r && data[i + 1] === g && data[i + 2] === b && data[i + 3] === 255) count++;
      return count;
    }""",
        [panel, ["--wb-blue", "--wb-green"][panel]],
    )


def test_points_appear_as_they_come(stage, page):
    run = FakeRun()
    shown = stage(run)
    shown.drawn(state="starting", points="0")
    before = ink(page, 0)
    run.feed(0, 19)
    shown.drawn(state="running", points="20", done="20")
    after = ink(page, 0)
    assert after > before + 100
    run.feed(20, 39)
    shown.drawn(points="40")
    assert "40 of 80 steps" in page.inner_text(".wb-header")
    assert re.search(r"test accuracy\s+79\.0 %", page.inner_text(".wb-panel >> nth=0"))
    assert page.get_by_role("progressbar").get_attribute("value") == "40"


def test_stop_asks_once_and_tells_that_it_did(stage, page):
    run = FakeRun()
    shown = stage(run)
    run.feed(0, 9)
    shown.drawn(done="10")
    button = page.get_by_role("button", name="Stop")
    button.focus()
    page.keyboard.press("Enter")
    assert button.is_disabled()
    shown.drawn(state="stopping")
    assert run.stops == 1
    assert page.get_by_role("button", name="Stopping …").is_disabled()
    run.end("stopped")
    shown.drawn(state="stopped")
    assert page.get_by_role("button", name="Stop").is_disabled()
    assert page.get_by_role("button", name="Resume").is_enabled()


def test_a_finished_run_shows_everything_without_a_kernel(stage, page):
    run = FakeRun()
    run.feed(0, 79)
    run.end(accuracy=0.972)
    shown = stage(run)
    shown.drawn(state="finished", points="80")
    assert page.evaluate("window.sent") == []
    assert "test accuracy 97.2 %" in page.inner_text(".wb-header")
    assert page.get_by_role("button", name="Stop").is_disabled()


def test_two_views_of_one_run(stage, page):
    run = FakeRun()
    shown = stage(run)
    run.feed(0, 9)
    shown.drawn(points="10")
    page.evaluate("show(); document.querySelectorAll('.wb-dashboard')[1].scrollIntoView()")
    page.wait_for_function("document.querySelectorAll('[data-points=\"10\"]').length === 2")
    page.evaluate("gone = document.querySelectorAll('.wb-dashboard')[1]; hide(); scrollTo(0, 0)")
    run.feed(10, 19)
    shown.drawn(points="20")
    assert page.evaluate("gone.dataset.points") == "10"


def test_lost_messages_are_asked_for_again(stage, page):
    run = FakeRun()
    shown = stage(run)
    run.feed(0, 9)
    shown.drawn(points="10")
    page.evaluate("receive({type: 'update', parts: [], runs: [{index: 0, start: 15}]}, [''])")
    assert page.evaluate("window.sent") == [{"type": "hello"}]


def test_themes_change_while_it_is_shown(stage, page):
    run = FakeRun()
    run.feed(0, 39)
    shown = stage(run, theme="dark")
    shown.drawn(points="40")
    assert color(page, ".wb-panel", "background-color") == "rgb(17, 17, 17)"
    dark = color(page, ".wb-dashboard", "--wb-blue")
    assert ink(page, 0) > 100
    page.evaluate("setTheme('light')")
    assert color(page, ".wb-dashboard", "--wb-blue") != dark
    page.evaluate(TWO_FRAMES)
    assert ink(page, 0) > 100


@pytest.mark.parametrize("num_ranks", [1, 64])
def test_every_rank_has_its_bars(stage, page, num_ranks):
    run = FakeRun(world_size=num_ranks)
    run.feed(0, 5)
    stage(run).drawn(points="6")
    bars = page.locator(".wb-bars")
    for panel in (0, 1, 2):
        assert bars.nth(panel).locator("[role=listitem]").count() == num_ranks
    last = bars.nth(0).locator("[role=listitem]").last
    megabytes = 133 + 5 * (num_ranks - 1)
    assert last.get_attribute("aria-label").startswith(
        f"rank {num_ranks - 1}: tensors now {megabytes}"
    )
    box = bars.nth(0).bounding_box()
    assert box["height"] < 220  # many ranks scroll
    assert box["width"] < 500


def test_arrow_keys_read_the_chart(stage, page):
    run = FakeRun()
    run.feed(0, 39)
    stage(run).drawn(points="40")
    chart = page.locator(".wb-plot").first
    chart.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text(".wb-note >> nth=0") == "step 38"
    assert page.inner_text(".wb-note >> nth=1") == "step 38"  # both charts point at one step
    page.keyboard.press("Escape")
    assert page.inner_text(".wb-note >> nth=0") == ""


def test_a_failure_is_an_alert_with_advice(stage, page):
    run = FakeRun()
    run.feed(0, 9)
    shown = stage(run)
    shown.drawn(points="10")
    assert page.locator(".wb-alert:visible").count() == 0
    run.end("failed", error=RuntimeError("rank 2, layer classifier.3: <b>no memory</b>"))
    shown.drawn(state="failed")
    alert = page.get_by_role("alert").inner_text()
    assert "rank 2, layer classifier.3: <b>no memory</b>" in alert
    assert "run.metrics" in alert


def test_nothing_is_drawn_out_of_sight(stage, page):
    run = FakeRun()
    shown = stage(run)
    run.feed(0, 9)
    shown.drawn(points="10")
    page.evaluate("document.body.style.paddingTop = '3000px'")
    page.evaluate(OUT_OF_SIGHT)
    run.feed(10, 19)
    shown.wait_for_message(done=20)
    page.evaluate(TWO_FRAMES)
    assert page.get_attribute(".wb-dashboard", "data-points") == "10"
    page.locator(".wb-dashboard").scroll_into_view_if_needed()
    shown.drawn(points="20")


def test_narrow_pages_stack_the_panels(stage, page):
    page.set_viewport_size({"width": 500, "height": 900})
    run = FakeRun()
    run.feed(0, 9)
    stage(run).drawn(points="10")
    lefts = {page.locator(".wb-panel").nth(i).bounding_box()["x"] for i in range(7)}
    assert len(lefts) == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 500
    page.set_viewport_size({"width": 1000, "height": 700})
