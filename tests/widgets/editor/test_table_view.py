"""The editor's table in Chromium: filter, folds, selection, the keyboard, and many rows."""

import pytest

import workbench as wb
from tests.plan import graphs
from tests.plan.graphs import Builder
from tests.widgets.editor.kit import MACHINE, FakeCluster, residual
from tests.widgets.editor.shown import BROWSER, EditorPage

pytestmark = BROWSER

VGG = graphs.vgg()
HYBRID = wb.Plan.hybrid(VGG, 4)
CLEARED = """filter => {
    filter.value = "";
    filter.dispatchEvent(new Event("input"));
    return document.querySelectorAll("tr.wb-layer").length;
}"""
ROW = "tr.wb-layer[data-name='{}']"


def test_filter(show, page):
    shown = show(HYBRID, MACHINE)
    page.get_by_label("filter layers").fill("LINEAR fc")
    assert shown.rows() == ["fc0", "fc1", "fc2"]
    assert page.get_by_text("3 layers fit").is_visible()
    page.get_by_label("filter layers").fill("converts")
    assert shown.rows() == ["avgpool", "relu1"]
    page.get_by_label("filter layers").fill("nothing such")
    assert page.get_by_text("0 layers fit").is_visible()
    # In one turn of the page: the browser has not laid the table out again since it was empty.
    now = page.get_by_label("filter layers").evaluate(CLEARED)
    assert now == len(shown.rows()) == 11


def test_folds_and_edits_of_all_blocks(show, page):
    shown = show(residual(12), MACHINE, world_size=2)
    assert shown.rows() == ["stem", "relu", "stage.0 … 11", "pool", "flatten", "head"]
    page.get_by_label("layers of stage.0 … 11").click()
    conv = "stage.0 … 11: conv1"
    assert conv in shown.rows()
    page.get_by_label(f"scheme, {conv}").select_option("shard_out")
    shown.settle()
    assert sorted(shown.widget.plan.layers) == sorted(f"stage.{i}.conv1" for i in range(12))
    page.get_by_label(f"layers of {conv}").click()
    page.get_by_label("scheme, stage.3.conv1").select_option("replicate")
    shown.settle()
    assert len(shown.widget.plan.layers) == 11
    assert page.get_by_label(f"scheme, {conv}").locator("option:checked").inner_text() == "mixed"
    page.get_by_role("button", name="Fold", exact=True).click()
    assert len(shown.rows()) == 6
    page.get_by_role("button", name="Unfold all").click()
    assert "stage.0.conv1" in shown.rows()


def test_several_rows_are_edited_at_once(show, page):
    shown = show(wb.Plan.data_parallel(VGG, 4), MACHINE)
    page.get_by_label("select fc0").click()
    page.get_by_label("select fc2").click(modifiers=["Shift"])
    assert "6 rows with 6 layers selected" in page.locator(".wb-bulk").inner_text()
    page.get_by_label("scheme, fc1").select_option("shard_out")
    shown.settle()
    assert list(shown.widget.plan.layers) == ["fc0", "fc1", "fc2"]
    page.get_by_role("button", name="Clear selection").click()
    assert page.locator(".wb-bulk").is_hidden()
    page.get_by_label("select all rows").click()
    page.get_by_label("recompute, fc0").click()
    shown.settle()
    assert sum(choice.recompute for choice in shown.widget.plan.layers.values()) == 11


def test_only_rows_that_change_are_drawn_again(show, page):
    shown = show(wb.Plan.data_parallel(VGG, 4), MACHINE)
    page.evaluate("""() => {
      window.drawn = new Set();
      const note = (all) => all.forEach(({ target }) => {
        const row = (target.closest ? target : target.parentElement).closest('tr.wb-layer');
        if (row) drawn.add(row.dataset.name);
      });
      new MutationObserver(note).observe(document.querySelector('.wb-table tbody'),
        { subtree: true, childList: true, characterData: true, attributes: true });
    }""")
    page.get_by_label("rank whose figures are shown").select_option("1")  # it has the same ones
    shown.until("document.querySelector('.wb-parts').ariaLabel.startsWith('a step of rank 1')")
    assert page.evaluate("[...drawn]") == []
    page.get_by_label("recompute, fc2").click()
    shown.settle()
    assert "fc2" in page.evaluate("[...drawn]")
    page.get_by_role("button", name="Undo").click()
    shown.settle()
    assert not page.get_by_label("recompute, fc2").is_checked()


def test_the_keyboard_suffices(show, page):
    shown = show(residual(12), MACHINE, world_size=2)
    page.locator(ROW.format("stem")).focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert shown.focused() == "stage.0 … 11"
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    assert shown.focused() == "stage.0 … 11: conv1"
    page.keyboard.press("F2")
    assert page.evaluate("document.activeElement.ariaLabel") == "scheme, stage.0 … 11: conv1"
    page.keyboard.press("ArrowDown")  # the select's own: the next option
    shown.settle()
    assert len(shown.widget.plan.layers) == 12
    page.keyboard.press("Escape")
    assert shown.focused() == "stage.0 … 11: conv1"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert shown.focused() == "stage.0 … 11"
    assert len(shown.rows()) == 6
    page.keyboard.press("Space")
    page.keyboard.press("Shift+ArrowDown")
    assert "2 rows" in page.locator(".wb-bulk").inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("End")
    assert shown.focused() == "head"
    page.keyboard.press("Enter")
    page.keyboard.press("Control+ArrowUp")
    assert shown.focused() == "flatten"  # which has no scheme to choose


def test_keys_do_not_reach_the_notebook(show, page):
    """Where they would be commands: "d d" deletes the cell."""
    show(HYBRID, MACHINE)
    page.evaluate("""() => {
      window.heard = [];
      document.addEventListener('keydown', (event) => window.heard.push(event.key));
    }""")
    for place in ("tr.wb-layer >> nth=1", ".wb-check input >> nth=2", "button >> nth=0"):
        page.locator(place).focus()
        for key in ("d", "Enter", "ArrowDown", "Control+s"):
            page.keyboard.press(key)
    assert set(page.evaluate("heard")) <= {"Control", "s"}


def test_focus_stays_in_a_cell_while_the_plan_changes(show, page):
    shown = show(HYBRID, MACHINE)
    page.get_by_label("shares, fc0").focus()
    page.keyboard.type("1 1")
    shown.widget.plan = HYBRID.with_layer("fc1", recompute=True)
    shown.settle()
    assert page.evaluate("document.activeElement.ariaLabel") == "shares, fc0"
    assert page.get_by_label("shares, fc0").input_value() == "1 1"


def test_other_layers_that_changed_can_be_shown(show, page):
    shown = show(wb.Plan.data_parallel(VGG, 4), MACHINE)
    page.get_by_label("scheme, fc0").select_option("shard_out")
    shown.settle()
    assert page.locator("tr.wb-edited").get_attribute("data-name") == "fc0"
    page.locator(".wb-last").get_by_role("button", name="avgpool").click()
    assert shown.focused() == "avgpool"
    assert "wb-also" in page.locator(ROW.format("avgpool")).get_attribute("class")


def test_names_with_html_and_of_200_characters(show, page):
    name = "<img src=x onerror=alert(1)>" + "n" * 172
    graph = Builder((4,)).linear(name, 4).linear("fc", 2).graph()
    show(graph, MACHINE, world_size=2)
    cell = page.locator("tr.wb-layer .wb-name").first
    assert len(cell.inner_text()) < 50
    assert cell.inner_text().startswith("<img src=x")
    assert cell.get_attribute("title") == name
    assert page.locator(".wb-editor img").count() == 0


def test_ten_thousand_rows(page, problems, edit):
    shown = EditorPage(page, edit(graphs.mlp(*[4] * 5001), world_size=2))
    assert page.locator(".wb-scroll").get_attribute("data-rows") == "9999"
    assert page.locator("tbody tr").count() < 80
    page.locator("tr.wb-layer").first.focus()
    page.keyboard.press("End")
    assert shown.focused() == "fc4999"
    most = page.evaluate("""async () => {
      const scroll = document.querySelector('.wb-scroll');
      let most = 0;
      for (let i = 0; i < 30; i++) {
        scroll.scrollTop = (i * 9377) % scroll.scrollHeight;
        await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
        most = Math.max(most, scroll.querySelectorAll('tbody tr').length);
      }
      return most;
    }""")
    assert most < 80
    page.get_by_label("filter layers").fill("fc4321")
    assert shown.rows() == ["fc4321"]
    page.get_by_label("scheme, fc4321").select_option("shard_out")
    shown.pass_on()
    assert list(shown.widget.plan.layers) == ["fc4321"]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [500, 1400])
def test_it_fits_the_page_and_can_be_read(show, page, theme, width):
    page.set_viewport_size({"width": width, "height": 900})
    show(HYBRID, MACHINE, theme=theme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ink, ground = (
        page.eval_on_selector(
            f"tr.wb-layer {of}", f"e => getComputedStyle(e).{what}.match(/[0-9]+/)[0]"
        )
        for of, what in ((".wb-name", "color"), ("td", "color"))
    )
    assert ink == ground == {"light": "33", "dark": "255"}[theme]
    page.set_viewport_size({"width": 1000, "height": 700})


def test_every_control_has_a_name(show, page):
    show(HYBRID, FakeCluster(4))
    assert (
        page.eval_on_selector_all(
            ".wb-editor :is(select, input, button, circle)",
            """all => all.filter((e) => !e.ariaLabel && !e.closest('label') && !e.textContent)
                   .map((e) => e.outerHTML)""",
        )
        == []
    )
