"""The editor in Chromium: edits of cells and of the plan, tasks, and what it tells."""

import workbench as wb
from tests.plan import graphs
from tests.widgets.editor.kit import MACHINE, FakeCluster, FakeRun, residual, searched
from tests.widgets.editor.shown import BROWSER
from workbench.widgets.editor import target

pytestmark = BROWSER

VGG = graphs.vgg()
HYBRID = wb.Plan.hybrid(VGG, 4)


def test_the_first_picture(show, page):
    shown = show(HYBRID, MACHINE)
    assert shown.rows()[:3] == ["conv", "relu", "pool"]
    assert page.get_by_label("scheme, fc0").input_value() == "shard_out"
    assert page.get_by_label("group, fc0").input_value() == "4"
    assert page.locator("[data-figure=step_s] b").inner_text().endswith("ms")
    crossing = page.locator("tr.wb-conversion").first.inner_text()
    assert "all-gather of rows in groups of 4, from pool" in crossing
    assert "forward" in crossing
    assert "backward" in crossing
    assert page.locator(".wb-bars .wb-row").count() == 4
    assert (
        page.locator(".wb-lanes .wb-row")
        .first.get_attribute("aria-label")
        .startswith("rank 0 holds ")
    )


def test_a_choice_in_a_cell_is_an_edit_of_the_plan(show, page):
    shown = show(HYBRID, MACHINE)
    page.get_by_label("scheme, fc0").select_option("duplicate")
    shown.settle()
    assert shown.widget.plan == HYBRID.with_layer("fc0", scheme="duplicate")
    assert page.locator("[data-figure=step_s] .wb-change").inner_text() != ""
    page.get_by_label("group, fc1").select_option("2")
    page.get_by_label("recompute, relu", exact=True).check()
    shown.settle()
    assert shown.widget.plan.layers["fc1"].group_size == 2
    assert shown.widget.plan.layers["relu"].recompute
    page.get_by_label("shares, fc1").fill("3 1")
    page.keyboard.press("Enter")
    shown.settle()
    assert shown.widget.plan.layers["fc1"].shares == (3, 1)


def test_what_is_assigned_in_python_appears(show, page):
    shown = show(HYBRID, MACHINE)
    shown.widget.plan = wb.Plan.data_parallel(VGG, 4)
    shown.settle()
    assert page.get_by_label("scheme, fc0").input_value() == "replicate"
    assert page.get_by_label("group, fc0").is_hidden()
    assert page.locator("tr.wb-conversion").count() == 0


def test_what_cannot_be_marks_the_cell_with_the_reason(show, page):
    shown = show(HYBRID, MACHINE)
    shares = page.get_by_label("shares, fc0")
    shares.fill("3 1")
    page.keyboard.press("Enter")
    shown.until("document.querySelector('.wb-editor').dataset.errors === '1'")
    reason = "layer 'fc0': 2 shares (3, 1) for a group of 4 ranks"
    assert page.get_by_role("tooltip").inner_text() == reason
    assert shares.get_attribute("aria-invalid") == "true"
    assert shares.input_value() == "3 1"  # to be mended, not typed again
    assert reason in page.get_by_role("alert").inner_text()
    assert shown.widget.plan is HYBRID
    shares.fill("3 1 1 1")
    page.keyboard.press("Enter")
    shown.settle()
    assert page.get_by_role("tooltip").count() == 0
    assert shown.widget.plan.layers["fc0"].shares == (3, 1, 1, 1)


def test_the_whole_plans_fields(show, page):
    shown = show(HYBRID, MACHINE)
    page.get_by_label("rounds").select_option("B")
    page.get_by_label("batch norm").select_option("synchronized")
    page.get_by_label("rows per rank").fill("3 1 1 1")
    page.get_by_label("batch size").fill("64")
    page.get_by_label("batch size").press("Enter")
    shown.settle()
    plan = shown.widget.plan
    assert (plan.rounds, plan.batch_norm, plan.row_shares) == ("B", "synchronized", (3, 1, 1, 1))
    assert shown.widget.experiment.batch_size == 64
    page.get_by_label("rows per rank").fill("")
    page.get_by_label("ranks", exact=True).fill("6")
    page.keyboard.press("Enter")
    shown.until("document.querySelector('.wb-editor').dataset.errors === '1'")
    assert "does not divide world_size 6" in page.get_by_role("alert").inner_text()
    assert shown.widget.plan.world_size == 4


def test_presets_undo_and_redo(show, page):
    shown = show(wb.Plan.data_parallel(VGG, 4), MACHINE)
    undo, redo = (page.get_by_role("button", name=name) for name in ("Undo", "Redo"))
    assert undo.is_disabled()
    page.get_by_label("preset").select_option(label="hybrid, groups of 2")
    shown.settle()
    assert shown.widget.plan == wb.Plan.hybrid(VGG, 4, 2)
    assert "hybrid over groups of 2" in page.locator(".wb-last").inner_text()
    undo.click()
    shown.settle()
    assert shown.widget.plan == wb.Plan.data_parallel(VGG, 4)
    redo.click()
    shown.settle()
    assert shown.widget.plan == wb.Plan.hybrid(VGG, 4, 2)
    page.locator("tr.wb-layer").first.focus()
    page.keyboard.press("Control+z")
    shown.settle()
    assert shown.widget.plan == wb.Plan.data_parallel(VGG, 4)
    page.keyboard.press("Control+Shift+z")
    shown.settle()
    assert shown.widget.plan == wb.Plan.hybrid(VGG, 4, 2)


def test_over_budget_is_red_and_said(show, page):
    device = MACHINE.device(0).replace(memory_bytes=100_000)
    show(HYBRID, MACHINE.replace(devices=(device,)))
    over = page.locator(".wb-over")
    assert over.count() == 4
    assert "over by" in over.first.inner_text()


def test_suggest(show, page, monkeypatch):
    monkeypatch.setattr(target, "search", searched)  # which takes its time: see test_services
    shown = show(wb.Plan.filters(VGG, 4), MACHINE)
    page.get_by_role("button", name="Suggest plans").click()
    shown.settle()
    assert page.locator(".wb-offers li").count() == 2
    page.locator("[data-point='1']").focus()
    page.keyboard.press("Enter")
    shown.settle()
    assert shown.widget.plan is shown.widget._suggested[1]
    page.locator("[data-point='0']").focus()
    page.keyboard.press(" ")
    shown.settle()
    assert shown.widget.plan is shown.widget._suggested[0]
    shown.widget.undo()
    page.locator("[data-offer='0']").click()
    shown.settle()
    assert shown.widget.plan is shown.widget._suggested[0]
    page.get_by_label("memory limit of a rank").fill("1kB")
    page.get_by_role("button", name="Suggest plans").click()
    shown.settle()
    assert "does not fit" in page.locator(".wb-offers").inner_text()


def test_without_a_machine_it_says_how_to_get_one(show, page):
    show(HYBRID)
    assert page.get_by_role("button", name="Suggest plans").is_disabled()
    assert "wb.Machine.preset" in page.get_by_label("Suggest", exact=True).inner_text()
    assert page.locator("[data-figure=step_s] b").inner_text() == "–"
    assert "machine" in page.locator("[data-figure=step_s] .wb-change").inner_text()
    assert page.locator("[data-figure=peak_bytes] b").inner_text() != "–"


def test_verify_and_measure_on_a_cluster(show, page):
    cluster = FakeCluster(4)
    shown = show(HYBRID, cluster)
    page.get_by_role("button", name="Verify on the cluster").click()
    shown.settle()
    assert page.get_by_text("✓ Exact: 1 tensors").is_visible()
    cluster.error = RuntimeError("engine 2 died")
    page.get_by_role("button", name="Verify on the cluster").click()
    shown.settle()
    failed = page.locator(".wb-bad").first.inner_text()
    assert "engine 2 died" in failed
    assert "editor.cluster" in failed
    page.get_by_role("button", name="Measure the cluster").click()
    shown.settle()
    assert page.locator("[data-figure=step_s] b").inner_text().endswith("ms")


def test_apply_to_a_run(show, page):
    run = FakeRun(
        wb.Experiment(plan=HYBRID, data="digits", optimizer=wb.SGD(lr=0.1), steps=9, batch_size=12)
    )
    shown = show(HYBRID, run)
    page.get_by_label("group, fc0").select_option("2")
    page.get_by_role("button", name="Apply to the run").click()
    shown.settle()
    assert run.plans == [HYBRID.with_layer("fc0", group_size=2)]
    assert page.get_by_text("✓ The run goes on under this plan").is_visible()


def test_save_and_load(show, page, tmp_path):
    shown = show(HYBRID, MACHINE)
    page.get_by_role("button", name="Save").click()
    shown.settle()
    assert "no file was named" in page.locator(".wb-bad").inner_text()
    page.get_by_label("path of a plan").fill(str(tmp_path / "plan.toml"))
    page.get_by_role("button", name="Save").click()
    shown.settle()
    shown.widget.preset("data parallel")
    page.get_by_role("button", name="Load").click()
    shown.settle()
    assert shown.widget.plan == HYBRID
    assert page.get_by_label("scheme, fc0").input_value() == "shard_out"


def test_figures_of_another_rank(show, page):
    shown = show(HYBRID.with_rows((3, 1, 1, 1)), MACHINE)
    assert "a step of rank 0" in page.locator(".wb-breakdown").inner_text()
    page.get_by_label("rank whose figures are shown").select_option("2")
    shown.pass_on()
    shown.until("document.querySelector('.wb-breakdown').innerText.includes('rank 2')")


def test_two_views_of_one_editor(show, page):
    shown = show(HYBRID, MACHINE)
    page.evaluate("window.show()")
    page.get_by_label("group, fc0").nth(1).select_option("2")
    shown.settle()
    assert page.get_by_label("group, fc0").first.input_value() == "2"
    page.evaluate("hide()")
    shown.widget.undo()
    shown.settle()
    assert page.get_by_label("group, fc0").input_value() == "4"


def test_another_model_in_the_same_view(show, page):
    shown = show(residual(12), MACHINE)
    page.get_by_role("button", name="Unfold all").click()
    shown.widget.plan = HYBRID
    shown.settle()
    assert shown.rows()[0] == "conv"
    assert page.locator("h3").inner_text().startswith("Toy: 11 layers over 4 ranks")


def test_a_kernel_that_does_not_answer_is_told_of(show, page):
    shown = show(HYBRID, MACHINE)
    page.clock.install()
    page.get_by_label("group, fc0").select_option("2")
    page.clock.run_for(9000)
    assert "not answered for 8 seconds" in page.get_by_role("alert").inner_text()
    shown.settle()
    assert page.get_by_role("alert").is_hidden()


def test_a_lost_patch_is_asked_for(show, page):
    shown = show(HYBRID, MACHINE)
    shown.widget.undo()
    page.evaluate("receive({type: 'patch', version: 99999, values: {}}, [])")
    assert {"type": "hello"} in page.evaluate("window.sent")
