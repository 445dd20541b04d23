"""Explorers in Chromium: every kind of control, keyboard, themes, and what goes wrong."""

import pytest

import workbench as wb
from tests.browser import chromium
from tests.plan import graphs
from tests.widgets.explorers.conftest import MACHINE, predicted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed"),
]
DRAWN = "(name) => Number(document.querySelector('.wb-explorer').dataset.drawn) > name"


def drawn(shown):
    return int(shown.page.get_attribute(".wb-explorer", "data-drawn"))


def test_every_slider_moves_by_keyboard_and_python(show, page):
    shown = show(wb.TimingExplorer, MACHINE)
    for control in shown.widget.controls()[:6]:
        slider = page.get_by_role("slider", name=control.label, exact=True)
        before, value = drawn(shown), getattr(shown.widget, control.name)
        slider.focus()
        page.keyboard.press("ArrowRight")
        shown.until(DRAWN, before, patience_s=60)
        assert getattr(shown.widget, control.name) > value
        assert slider.get_attribute("aria-valuetext") == control.text(
            getattr(shown.widget, control.name)
        )
    shown.widget.world_size = 4096
    shown.pass_on()
    assert "4,096 workers" in page.locator("h3").inner_text()
    assert page.locator("[data-name=world_size] output").inner_text() == "4,096"


def test_choices_and_buttons(show, page):
    shown = show(wb.TimingExplorer, MACHINE, bandwidth=1e7)
    page.get_by_label("codec").select_option("bf16")
    shown.pass_on()
    assert shown.widget.codec == "bf16"
    assert page.get_by_text("synchronous, bf16").first.is_visible()
    page.get_by_role("button", name="Take the machine's link").click()
    shown.pass_on()
    assert shown.widget.bandwidth == MACHINE.across.bandwidth


def test_figures_are_there_for_those_who_do_not_see(show, page):
    show(wb.TimingExplorer)
    charts = page.get_by_role("img", name="A step's time by bandwidth")
    assert charts.count() == 1
    page.get_by_text("In figures").click()
    table = page.get_by_role("table", name="Strategies, the fastest first")
    assert table.get_by_role("row").count() == 9


def test_what_is_asked_while_the_kernel_works_is_not_queued_up(show, page):
    shown = show(wb.TimingExplorer)
    slider = page.get_by_role("slider", name="workers", exact=True)
    slider.focus()
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    assert len(page.evaluate("window.sent")) == 1  # and the last one, when that was heard
    shown.until(DRAWN, drawn(shown), patience_s=60)
    shown.until(
        "document.querySelector('[data-name=world_size] output').innerText === '512'", patience_s=60
    )
    assert shown.widget.world_size == 512


def test_refused_values_are_told_beside_their_control(show, page):
    shown = show(wb.TimingExplorer)
    page.evaluate("document.querySelector('[data-name=width] input').max = 50")
    page.get_by_role("slider", name="pipeline width").fill("40")
    shown.pass_on()
    slider = page.get_by_role("slider", name="pipeline width")
    assert slider.get_attribute("aria-invalid") == "true"
    assert "has places 0 to 7" in page.locator("[data-name=width] .wb-reason").inner_text()
    assert shown.widget.width == 2


def test_staleness(show, page):
    shown = show(wb.StalenessExplorer, theme="dark")
    page.get_by_label("codec").select_option("int4")
    shown.pass_on()
    page.get_by_role("slider", name="lr × curvature").fill("72")
    shown.pass_on()
    assert shown.widget.codec == "int4"
    assert "steps diverge" in page.locator(".wb-said").inner_text()
    assert page.locator(".wb-panel").count() == 3
    page.get_by_label("loss", exact=True).select_option("digits")
    shown.pass_on()
    assert shown.widget.loss == "digits"
    assert "Digits that are recognised" in page.locator(".wb-said").inner_text()
    assert page.locator("[data-name=condition]").count() == 0


def test_parts_of_the_memory_map_are_chosen_by_keyboard(show, page, prediction):
    shown = show(wb.MemoryMap, prediction)
    page.locator("[data-cell]").first.focus()
    page.keyboard.press("ArrowRight")
    name = page.evaluate("document.activeElement.dataset.cell")
    page.keyboard.press("Enter")
    shown.pass_on()
    assert shown.widget.inside == name
    page.get_by_role("button", name="Show all", exact=True).click()
    shown.pass_on()
    assert shown.widget.inside == ""
    page.get_by_role("button", name="rank 2:").click()
    shown.pass_on()
    assert shown.widget.rank == 2
    page.get_by_label("areas by").select_option("layer, then category")
    shown.pass_on()
    assert shown.widget.by == "layer"


def test_cells_of_the_matrix_are_read_by_keyboard(show, page, prediction):
    shown = show(wb.TrafficMatrix, prediction)
    page.locator("[data-cell='0,0']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert focused.startswith("rank 2 to rank 1: ")
    page.get_by_label("collective").select_option("all_gather")
    shown.pass_on()
    assert shown.widget.op == "all_gather"
    # The drawing is another one, and the cell that was read still has the focus.
    assert page.evaluate("document.activeElement.dataset.cell") == "1,2"


def test_scaling_curves_appear_as_they_are_known(show, page, prediction):
    shown = show(wb.ScalingExplorer, prediction)
    assert shown.widget.settle()
    shown.until("document.querySelector('.wb-explorer').dataset.busy === ''", patience_s=60)
    page.get_by_role("slider", name="ranks").fill("14")
    shown.pass_on()
    assert shown.widget.world_size == 65536
    assert "on 65,536" in page.locator("h3").inner_text()
    page.get_by_label("links").select_option("cpu-1gbe")
    shown.pass_on()
    assert shown.widget.settle()
    shown.pass_on()
    assert shown.widget.link == "cpu-1gbe"


def test_without_a_machine_an_alert_says_what_to_do(show, page, prediction):
    shown = show(wb.ScalingExplorer, predicted(prediction.experiment.plan, None))
    assert shown.widget.settle()
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


def test_a_kernel_that_does_not_answer_keeps_the_last_picture(show, page):
    shown = show(wb.TimingExplorer)
    page.clock.install()
    page.get_by_role("slider", name="workers").fill("3")
    page.clock.run_for(9000)
    assert "not answered for 8 seconds" in page.get_by_role("alert").inner_text()
    assert page.locator(".wb-drawing svg").count() == 2
    shown.pass_on()
    assert page.get_by_role("alert").is_hidden()


def test_two_views_of_one_explorer(show, page):
    shown = show(wb.TimingExplorer)
    page.evaluate("window.show()")
    page.get_by_label("codec").nth(1).select_option("none")
    shown.pass_on()
    assert page.get_by_label("codec").first.input_value() == "none"
    page.evaluate("hide()")
    shown.widget.codec = "fp16"
    shown.pass_on()
    assert page.get_by_label("codec").input_value() == "fp16"
