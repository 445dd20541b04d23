"""The benchmarks of what is computed, not how fast, run quickly and give every figure."""

import json

import pytest

from workbench.bench.__main__ import main
from workbench.bench.exactness.exactness import figures_of
from workbench.bench.models import smallest
from workbench.bench.report import Figure
from workbench.model.tracing.trace import trace
from workbench.train.verify.verification import Difference, Verification


def content_of(tmp_path, name):
    assert main([name, "--quick", "--json", "found.json", "--plot", "found.svg"]) == 0
    assert (tmp_path / "found.svg").read_text().startswith("<svg")
    return json.loads((tmp_path / "found.json").read_text())


@pytest.mark.slow
def test_exactness(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = content_of(tmp_path, "exactness")
    assert content["figures"].keys() == {"worst_fp64", "worst_fp32", "exact"}
    assert content["figures"]["worst_fp64"]["max"] <= 1e-10
    assert content["figures"]["exact"]["min"] == 1.0
    assert len(content["rows"]) == 18


def test_what_no_split_can_avoid_is_said_apart():
    def found(precision, error, rounding):
        return Verification("m", precision, 1, (Difference("output", "a", 0, error, rounding),))

    fine, odd = found("fp32", 2e-6, 1e-6), found("fp32", 8e-2, 1e-1)
    assert figures_of([fine, odd], "fp32") == {
        "worst_fp32": Figure.of([2e-6]),
        "beyond_fp32": Figure.of([8e-2]),
        "rounding_fp32": Figure.of([1e-1]),
    }
    assert figures_of([fine, found("fp64", 1e-12, 0.0)], "fp64") == {
        "worst_fp64": Figure.of([1e-12])
    }


@pytest.mark.slow
def test_accuracy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = content_of(tmp_path, "accuracy")
    names = {"accuracy", "accuracy_of_one_process", "accuracy_difference"}
    assert content["figures"].keys() == names
    assert [row["system"] for row in content["rows"]] == ["hybrid, 4 engines", "one process"]
    assert all(0 <= row["accuracy"] <= 1 for row in content["rows"])
    # The same weights and rows: only dropout's masks are their own.
    ours, theirs = (row["last loss"] for row in content["rows"])
    assert ours == pytest.approx(theirs, rel=0.05)


@pytest.mark.slow
def test_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = content_of(tmp_path, "models")
    assert [row["exact"] for row in content["rows"]] == ["yes", "yes"]
    assert content["figures"]["traced"]["min"] == 1.0


@pytest.mark.slow
def test_each_family_has_one_smallest():
    names = ("resnet50", "resnet18", "wide_resnet50_2", "squeezenet1_1")
    graphs = {name: trace(name, input_shape=(3, 32, 32)) for name in names}
    assert smallest(graphs) == {"squeezenet": "squeezenet1_1", "resnet": "resnet18"}
