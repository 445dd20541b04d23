"""The benchmark of predictions runs, quickly, and gives every figure."""

import json

import pytest

from workbench.bench.__main__ import main


@pytest.mark.slow
def test_quick(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["predict", "--quick", "--json", "found.json", "--plot", "found.svg"]) == 0
    assert (tmp_path / "found.svg").read_text().startswith("<svg")
    content = json.loads((tmp_path / "found.json").read_text())
    assert content["figures"].keys() == {
        "memory_error_median",
        "memory_error_worst",
        "memory_in_band",
        "memory_band",
        "traffic_exact",
        "time_error_median",
        "time_error_worst",
        "time_bias_median",
        "time_inside_band",
        "kendall_tau",
        "kendall_tau_all_pairs",
        "predict_ms",
        "at_65536_s",
    }
    assert content["figures"]["memory_error_worst"]["max"] < 0.02
    assert content["figures"]["traffic_exact"]["min"] == 1.0
    assert content["figures"]["memory_in_band"]["min"] == 1.0
    assert len(content["rows"]) == 2


def test_parts_that_are_not_there_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["predict", "--quick", "--only", "time"])
    assert "--only: there is no part 'time': memory, times, speed" in capsys.readouterr().err
