"""Drawings of explorers in Chromium: keyboard, themes, and what goes wrong."""

import pytest

import workbench as wb
from tests.browser import chromium
from tests.plan import graphs
from tests.widgets.explorers.conftest import MACHINE, predicted
from workbench.bench.harness.browser import FrontEnd

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed"),
]


@pytest.fixture
def show(page, problems, made):
    """`show(TimingExplorer, ...)` gives one, and a page that shows its drawing."""

    def make(kind, *arguments, theme="light", **state):
        explorer = made(kind, *arguments, **state)
        return explorer, FrontEnd(page, explorer.drawing, theme)

    return make


def test_what_is_moved_or_assigned_is_drawn(show, page):
    explorer, shown = show(wb.TimingExplorer, MACHINE, bandwidth=1e7)
    explorer.controls["codec"].value = "bf16"
    shown.pass_on()
    assert page.get_by_text("synchronous, bf16").first.is_visible()
    explorer.world_size = 4096
    shown.pass_on()
    assert "4,096 workers" in page.locator("h3").inner_text()


def test_figures_are_there_for_those_who_do_not_see(show, page):
    show(wb.TimingExplorer)
    charts = page.get_by_role("img", name="A step's time by bandwidth")
    assert charts.count() == 1
    page.get_by_text("In figures").click()
    table = page.get_by_role("table", name="Strategies, the fastest first")
    assert table.get_by_role("row").count() == 9


def test_staleness(show, page):
    explorer, shown = show(wb.StalenessExplorer, theme="dark", codec="int4")
    explorer.controls["lr"].index = 72
    shown.pass_on()
    assert "steps diverge" in page.locator(".wb-said").inner_text()
    assert page.locator(".wb-panel").count() == 3
    explorer.controls["loss"].value = "digits"
    shown.pass_on()
    assert "Digits that are recognised" in page.locator(".wb-said").inner_text()


def test_parts_of_the_memory_map_are_chosen_by_keyboard(show, page, prediction):
    explorer, shown = show(wb.MemoryMap, prediction)
    page.locator("[data-cell]").first.focus()
    page.keyboard.press("ArrowRight")
    name = page.evaluate("document.activeElement.dataset.cell")
    page.keyboard.press("Enter")
    shown.pass_on()
    assert explorer.inside == name
    explorer.controls["whole"].click()
    shown.pass_on()
    assert explorer.inside == ""
    page.get_by_role("button", name="rank 2:").click()
    shown.pass_on()
    assert explorer.rank == explorer.controls["rank"].value == 2


def test_cells_of_the_matrix_are_read_by_keyboard(show, page, prediction):
    explorer, shown = show(wb.TrafficMatrix, prediction)
    page.locator("[data-cell='0,0']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert focused.startswith("rank 2 to rank 1: ")
    explorer.controls["op"].value = "all_gather"
    shown.pass_on()
    # The drawing is another one, and the cell that was read still has the focus.
    assert page.evaluate("document.activeElement.dataset.cell") == "1,2"


def test_scaling_curves_appear_as_they_are_known(show, page, prediction):
    explorer, shown = show(wb.ScalingExplorer, prediction)
    assert explorer.settle()
    shown.until("document.querySelector('.wb-explorer').dataset.busy === ''", patience_s=60)
    explorer.controls["world_size"].value = 65536
    shown.pass_on()
    assert "on 65,536" in page.locator("h3").inner_text()


def test_without_a_machine_an_alert_says_what_to_do(show, page, prediction):
    explorer, shown = show(wb.ScalingExplorer, predicted(prediction.experiment.plan, None))
    assert explorer.settle()
    shown.pass_on()
    assert "time needs a machine" in page.get_by_role("alert").inner_text()


def test_themes_change_while_it_is_shown(show, page):
    show(wb.TimingExplorer, theme="dark")
    ground = "getComputedStyle(document.querySelector('.wb-drawing svg rect')).fill"
    assert page.evaluate(ground) == "rgb(17, 17, 17)"
    page.evaluate("setTheme('light')")
    assert page.evaluate(ground) == "rgb(255, 255, 255)"


def test_narrow_pages_and_long_names(show, page):
    long = graphs.Builder((3, 8, 8)).conv("<b>" + "n" * 200, 8).graph()
    page.set_viewport_size({"width": 480, "height": 800})
    prediction = predicted(wb.Plan.data_parallel(long, 2))
    for kind in (wb.MemoryMap, wb.TrafficMatrix):
        show(kind, prediction)
        assert page.evaluate("document.documentElement.scrollWidth") <= 480
        assert page.locator(".wb-explorer b b").count() == 0
    page.set_viewport_size({"width": 1000, "height": 700})


def test_a_kernel_that_does_not_answer_keeps_the_last_picture(show, page, prediction):
    _, shown = show(wb.MemoryMap, prediction)
    page.clock.install()
    page.get_by_role("button", name="rank 2:").click()
    page.clock.run_for(9000)
    assert "not answered for 8 seconds" in page.get_by_role("alert").inner_text()
    assert page.locator(".wb-drawing svg").count() == 2
    shown.pass_on()
    assert page.get_by_role("alert").is_hidden()


def test_two_views_of_one_explorer(show, page, prediction):
    explorer, shown = show(wb.MemoryMap, prediction)
    page.evaluate("window.show()")
    page.get_by_role("button", name="rank 2:").nth(1).click()
    shown.pass_on()
    assert "Rank 2 at its peak" in page.locator("h4").first.inner_text()
    page.evaluate("hide()")
    explorer.rank = 1
    shown.pass_on()
    assert "Rank 1 at its peak" in page.locator("h4").first.inner_text()
