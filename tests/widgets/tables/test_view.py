"""The tables of a cluster in Chromium: every button, pages, and a cluster that is gone."""

import pytest

from tests.browser import chromium
from workbench.widgets.tables import ClusterView, JobTable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed"),
]


def press(shown, page, name):
    page.get_by_role("button", name=name, exact=True).focus()
    page.keyboard.press("Enter")
    shown.pass_on()
    assert shown.widget.settle()
    shown.pass_on()


def test_every_button_of_a_job(show, page, cluster):
    number = cluster.submit(name="vgg11", steps=200)
    cluster.run(number, (0,), step=50)
    shown = show(JobTable, cluster)
    row = page.locator("tr[data-job='1']")
    assert "▶ running" in row.inner_text()
    assert row.get_by_role("progressbar").get_attribute("value") == "50"
    press(shown, page, "Pause job 1")
    assert "paused" in row.inner_text()
    # The same button, which has kept the focus.
    assert page.evaluate("document.activeElement.innerText") == "Resume"
    press(shown, page, "Resume job 1")
    press(shown, page, "higher priority for job 1")
    assert row.locator(".wb-priority").inner_text() == "1"
    press(shown, page, "lower priority for job 1")
    assert row.locator(".wb-priority").inner_text() == "0"
    press(shown, page, "Cancel job 1")
    assert "queued" in row.inner_text()  # what has done steps is asked for twice
    press(shown, page, "Sure? Cancel job 1")
    assert "cancelled" in row.inner_text()
    stop = page.get_by_role("button", name="Stop job 1")
    assert stop.get_attribute("aria-disabled") == "true"
    assert stop.get_attribute("title") == "not now: it has ended: cancelled"
    stop.click(force=True)
    assert page.evaluate("window.sent") == []


def test_stop_and_what_the_server_refuses(show, page, cluster):
    cluster.submit()
    shown = show(JobTable, cluster)
    cluster.jobs.refuses = "the job server does not answer"
    press(shown, page, "Stop job 1")
    assert page.locator(".wb-told").inner_text() == "the job server does not answer"
    cluster.jobs.refuses = ""
    press(shown, page, "Stop job 1")
    assert "■ stopped" in page.locator("tr[data-job='1']").inner_text()
    assert page.locator(".wb-told").is_hidden()


def test_pages_and_the_filter(show, page, cluster):
    for letter in "abcde":
        cluster.submit(name=f"net-{letter}")
    shown = show(JobTable, cluster, page_size=2)
    assert page.locator(".wb-pages").inner_text().split() == ["‹", "page", "1", "of", "3", "›"]
    assert page.get_by_role("button", name="previous page").is_disabled()
    press(shown, page, "next page")
    assert page.locator(".wb-name").all_inner_texts() == ["net-c", "net-d"]
    press(shown, page, "previous page")
    assert page.locator(".wb-name").all_inner_texts() == ["net-a", "net-b"]
    page.get_by_label("filter jobs").fill("net-e")
    shown.until("document.querySelectorAll('tbody tr').length === 1", patience_s=60)
    assert page.locator(".wb-name").all_inner_texts() == ["net-e"]
    assert page.get_by_text("1 of 5 jobs").is_visible()
    page.get_by_label("filter jobs").fill("nothing")
    shown.until("document.querySelectorAll('tbody tr').length === 0", patience_s=60)
    assert page.get_by_text("No job has all of these words.").is_visible()


def test_names_are_text_and_long_ones_are_cut(show, page, cluster):
    cluster.submit(name="<img src=x onerror=alert(1)>" + "y" * 200)
    show(JobTable, cluster)
    assert page.locator("tbody img").count() == 0
    assert page.locator(".wb-name").inner_text().startswith("<img src=x")
    for width in (1000, 420):
        page.set_viewport_size({"width": width, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.set_viewport_size({"width": 1000, "height": 700})


def test_an_empty_table_says_how_to_fill_it(show, page, cluster):
    show(JobTable, cluster)
    assert page.get_by_text("cluster.train(experiment)").is_visible()


@pytest.mark.parametrize("kind", [JobTable, ClusterView])
def test_a_cluster_that_is_gone(show, page, cluster, kind):
    cluster.submit(name="vgg11")
    shown = show(kind, cluster, theme="dark")
    count = page.locator("tbody tr").count()
    assert page.get_by_role("alert").is_hidden()
    cluster.link.is_kept = False
    shown.widget.look()
    shown.pass_on()
    assert "cluster.restart()" in page.get_by_role("alert").inner_text()
    assert page.locator("tbody tr").count() == count
    cluster.link.is_kept = True
    shown.widget.look()
    shown.pass_on()
    assert page.get_by_role("alert").is_hidden()


def test_a_kernel_that_does_not_answer(show, page, cluster):
    cluster.submit()
    shown = show(JobTable, cluster)
    page.clock.install()
    page.get_by_role("button", name="Pause job 1").click()
    page.clock.run_for(9000)
    assert "not answered for 8 seconds" in page.get_by_role("alert").inner_text()
    shown.pass_on()
    assert shown.widget.settle()
    shown.pass_on()
    assert page.get_by_role("alert").is_hidden()


def test_engines(show, page, cluster):
    number = cluster.submit(name="vgg11", engines=2)
    cluster.run(number, (0, 1))
    shown = show(ClusterView, cluster)
    assert page.locator("tbody tr").count() == 5
    assert "1: vgg11, rank 1" in page.locator("tr[data-engine='1']").inner_text()
    assert page.get_by_role("img", name="engine 0: processor 50 % of one core").count() == 1
    assert page.get_by_role("img", name="engine 0: memory 1.00 GiB of 16.0 GiB").count() == 1
    cluster.link.store.set_engine(1, state="dead", death="was ended by SIGKILL")
    shown.widget.look()
    shown.pass_on()
    assert "✕ dead" in page.locator("tr[data-engine='1']").inner_text()
