"""A run as one page, and its metrics as files."""

import importlib.util
import shutil
from html.parser import HTMLParser

import pandas
import pytest

import workbench as wb
from workbench.client.records import optional
from workbench.client.records.environment import MACHINE
from workbench.plan.io.html import page

VOID = {"meta", "img", "br"}


class Checked(HTMLParser):
    """Every element is closed where it should be; nothing runs, and nothing is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.said = ""

    def handle_starttag(self, tag, attributes):
        assert tag != "script"
        for name, value in attributes:
            assert not name.startswith("on")
            assert name not in ("src", "href") or value.startswith("data:image/svg+xml;base64,")
        if tag not in VOID:
            self.opened.append(tag)

    def handle_endtag(self, tag):
        assert self.opened.pop() == tag

    def handle_data(self, data):
        self.said += data


def read(path):
    checked = Checked()
    checked.feed(path.read_text())
    assert checked.opened == []
    return checked.said


def test_a_page_says_how_a_run_went_on_what_and_why_nothing_was_predicted(moved, tmp_path):
    (moved / MACHINE).unlink(missing_ok=True)  # this host may have been calibrated
    run = wb.Run.load(moved)
    run.to_html(tmp_path / "run.html")
    said = read(tmp_path / "run.html")
    assert "finished, step 6 of 6" in said
    assert "learning rate 0.05 since step" in said
    assert "Linear(in_features=64, out_features=32, bias=True)" in said
    assert run.environment.versions["torch"] in said
    assert "no machine was calibrated" in said


def test_predicted_stands_beside_measured_where_a_machine_is_known(finished, tmp_path):
    folder = shutil.copytree(finished.directory, tmp_path / "run")
    wb.Machine.preset("h100-nvlink").save(folder / MACHINE)
    run = wb.Run.load(folder)
    assert run.machine == wb.Machine.preset("h100-nvlink")
    run.to_html(tmp_path / "run.html")
    said = read(tmp_path / "run.html")
    assert "predicted ms" in said
    assert "Nothing is set beside" not in said


def test_what_people_wrote_cannot_break_out(finished, tmp_path):
    folder = shutil.copytree(finished.directory, tmp_path / "<script>alert(1)<")
    run = wb.Run.load(folder)
    run.notes.append("<script>alert(2)</script>")
    run.error = RuntimeError("</pre><script>alert(3)</script>")
    run.to_html(tmp_path / "run.html")
    assert "alert(2)" in read(tmp_path / "run.html")


def test_a_run_without_a_step_has_a_page_too(past, tmp_path):
    folder = shutil.copytree(past.failed["all_raise"].directory, tmp_path / "run")
    (folder / "environment.json").unlink()
    run = wb.Run.load(folder)
    run.to_html(tmp_path / "run.html")
    said = read(tmp_path / "run.html")
    assert "No step was measured" in said
    assert "has no data" in said
    assert "does not say what it ran with" in said


def test_titles_are_text():
    assert "<title>a &amp; b</title>" in page("a & b", [])


def test_metrics_are_written_as_csv(finished, tmp_path):
    finished.to_csv(tmp_path / "m.csv")
    found = pandas.read_csv(tmp_path / "m.csv")
    pandas.testing.assert_frame_equal(found, finished.metrics, check_dtype=False)


def test_metrics_are_written_as_parquet_where_pyarrow_is(finished, tmp_path):
    if importlib.util.find_spec("pyarrow") is None:
        pytest.skip("pyarrow is not installed")
    finished.to_parquet(tmp_path / "m.parquet")
    found = pandas.read_parquet(tmp_path / "m.parquet")
    pandas.testing.assert_frame_equal(found, finished.metrics)


def test_without_pyarrow_the_error_says_what_to_install(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(optional, "find_spec", lambda _name: None)
    with pytest.raises(ModuleNotFoundError, match=r"parallel-workbench\[parquet\]"):
        finished.to_parquet(tmp_path / "m.parquet")
    assert list(tmp_path.iterdir()) == []
