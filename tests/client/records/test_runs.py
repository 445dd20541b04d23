"""All runs below a folder as one table, and some of them beside each other."""

import shutil

import pandas
import pytest

import workbench as wb
from workbench.client.records.curves import MOST_POINTS, figure_panels, loss_panel
from workbench.store.run_folder import EVALUATIONS, add_evaluation


@pytest.fixture
def both(past, tmp_path):
    """A folder with two finished runs that differ in their optimizer and in a layer."""
    for name, run in (("a<b", past.finished), ("nested/b", past.other)):
        shutil.copytree(run.directory, tmp_path / "both" / name)
    return tmp_path / "both"


def test_runs_below_a_folder_are_one_line_each(both, finished, tmp_path):
    folder = tmp_path / "all"
    shutil.copytree(both, folder)
    (folder / ".cluster-x").mkdir()
    shutil.copytree(both / "a<b", folder / ".cluster-x" / "hidden")
    (folder / "broken").mkdir()
    (folder / "broken" / "experiment.toml").write_text("steps =")
    (folder / "nested" / "b" / "outcome.json").unlink()
    found = wb.runs(folder).set_index("name")
    assert list(found.index) == ["a<b", "b", "broken"]
    assert found["state"].tolist() == ["finished", "unfinished", "unreadable"]
    assert "not TOML" in found.loc["broken", "reason"]
    one = found.loc["a<b"]
    assert (one["steps"], one["experiment.steps"], one["world_size"]) == (6, 6, 2)
    assert one["loss"] == finished.metrics["loss"].iloc[-1]
    assert one["accuracy"] == finished.evaluation["accuracy"]
    assert (one["optimizer"], one["lr"], one["plan"]) == ("sgd", 0.1, "cut over 2, 2 ranks")
    assert found.loc["b", "optimizer"] == "adamw"
    assert found.loc["b", "accuracy"] == pytest.approx(1.0, abs=1.0)
    times = finished.environment.times
    assert one["wall_s"] == times.ended - times.started
    assert wb.Run.load(one["folder"]).state == "finished"


def test_metrics_csv_alone_will_do(both, finished, tmp_path):
    shutil.copytree(both / "a<b", tmp_path / "one" / "a")
    shutil.rmtree(tmp_path / "one" / "a" / "attempts")
    (line,) = wb.runs(tmp_path / "one").to_dict("records")
    assert (line["steps"], line["loss"]) == (6, finished.metrics["loss"].iloc[-1])


def test_no_runs_are_an_empty_table_and_no_folder_is_an_error(tmp_path):
    assert len(wb.runs(tmp_path)) == 0
    with pytest.raises(FileNotFoundError, match="no folder"):
        wb.runs(tmp_path / "nowhere")


def test_only_what_differs_is_told(both):
    found = wb.compare_runs(both / "a<b", str(both / "nested" / "b"))
    first, second = found.configuration
    assert (first["optimizer"], second["optimizer"]) == ("sgd", "adamw")
    assert (first["lr"], second["lr"]) == (0.05, 0.01)
    assert {"plan", "evaluate_every", "layer 1", "layer 3"} < first.keys()
    assert {"model", "batch_size", "seed", "steps", "layer 2"}.isdisjoint(first)
    assert found.environments == [{}, {}]
    frame = found.to_frame()
    assert frame.index.tolist() == ["a<b", "b"]
    assert frame["steps"].tolist() == [6, 6]
    assert frame["state"].tolist() == ["finished"] * 2
    assert "adamw" in repr(found)
    assert "batch_size" not in repr(found)


def test_the_rich_form_reads_without_a_kernel_and_names_cannot_break_out(both, tmp_path):
    found = wb.compare_runs(both / "a<b", both / "nested" / "b")
    html = found._repr_html_()
    assert "a&lt;b" in html
    assert "<script" not in html
    assert "data:image/svg+xml;base64," in html
    assert "a&lt;b" in found.svg()
    for name in ("x.html", "x.svg", "x.csv"):
        found.save(tmp_path / name)
    assert (tmp_path / "x.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "x.svg").read_text() == found.svg()
    assert len(pandas.read_csv(tmp_path / "x.csv")) == 2
    with pytest.raises(ValueError, match=r"\.svg, \.html or \.csv, got 'x\.png'"):
        found.save(tmp_path / "x.png")


def test_versions_that_differ_are_told_and_equal_names_are_numbered(both, tmp_path):
    shutil.copytree(both / "a<b", tmp_path / "a<b")
    path = tmp_path / "a<b" / "environment.json"
    path.write_text(path.read_text().replace('"numpy": "', '"numpy": "0.'))
    found = wb.compare_runs(both / "a<b", tmp_path / "a<b")
    assert found.configuration == [{}, {}]
    assert [set(each) for each in found.environments] == [{"numpy"}] * 2
    assert list(found.runs) == ["a<b", "a<b (2)"]
    assert "configuration" not in repr(found)


def test_what_cannot_be_compared_is_refused(finished):
    with pytest.raises(ValueError, match="two runs or more can be compared, got 1"):
        wb.compare_runs(finished)
    with pytest.raises(TypeError, match="got int"):
        wb.compare_runs(finished, 7)


def test_metrics_of_one_s_own_are_told_like_accuracy(both):
    for name, f1 in (("a<b", 0.25), ("nested/b", 0.75)):
        (both / name / EVALUATIONS).unlink()
        add_evaluation(both / name, 3, {"loss": 2.0, "f1": 0.5})
        add_evaluation(both / name, 6, {"loss": 1.0, "f1": f1})
    found = wb.runs(both).set_index("name")
    assert found["test_f1"].to_dict() == {"a<b": 0.25, "b": 0.75}
    assert found["accuracy"].isna().all()
    compared = wb.compare_runs(both / "a<b", both / "nested" / "b")
    assert compared.to_frame()["test_f1"].tolist() == [0.25, 0.75]
    assert "test f1" in compared._repr_html_()
    panels = figure_panels({name: run.evaluations for name, run in compared.runs.items()})
    assert [panel.title for panel in panels] == ["F1 by step"]
    assert "F1 by step" in compared.svg()


def test_a_long_curve_is_thinned():
    steps = range(10 * MOST_POINTS + 3)
    metrics = pandas.DataFrame({"step": steps, "rank": 0, "loss": [1.0 / (1 + s) for s in steps]})
    body = loss_panel({"a": metrics}).body
    assert body.count("L") <= MOST_POINTS
