"""What a benchmark prints and writes."""

import json

import pytest

from workbench.bench.__main__ import BENCHES, main
from workbench.bench.harness import report
from workbench.bench.harness.report import Devices, Figure, Report, engines_here
from workbench.hosts.host import Gpu, Host

REPORT = Report(
    "demo",
    ({"system": "ours", "samples/s": 123.456}, {"system": "theirs", "samples/s": 61.0}),
    {"throughput_vs_theirs": Figure.of([2.0, 1.5, 3.0])},
    ("a note",),
)


def test_a_figure_is_a_median_and_a_range():
    assert Figure.of([2.0, 1.5, 3.0]) == Figure(median=2.0, min=1.5, max=3.0)


def test_the_table_is_for_people():
    lines = REPORT.as_text().splitlines()
    assert lines[:4] == [
        "bench demo",
        "system  samples/s",
        "ours        123.5",
        "theirs         61",
    ]
    assert "throughput_vs_theirs  2 (1.5 .. 3)" in lines
    assert "a note" in lines


def test_rows_with_other_columns_are_a_table_of_their_own():
    lines = Report("demo", (*REPORT.rows, {"k": 2}), {}).as_text().splitlines()
    assert lines[3:7] == ["theirs         61", "", "k", "2"]


def test_the_file_is_for_programs(tmp_path):
    REPORT.write(tmp_path / "demo.json")
    content = json.loads((tmp_path / "demo.json").read_text())
    assert set(content) >= {"bench", "machine", "versions", "rows", "figures"}
    assert content["figures"]["throughput_vs_theirs"] == {"median": 2.0, "min": 1.5, "max": 3.0}
    assert content["versions"]["torch"] != "not installed"


def test_an_unknown_name_lists_the_known(capsys):
    with pytest.raises(SystemExit):
        main(["splitbrian"])
    said = capsys.readouterr().err
    assert all(name in said for name in BENCHES)


def host(cores, **fields):
    return Host("here", tuple((number,) for number in range(cores)), **fields)


GPU = Gpu("0", "a GPU", 2**34)


@pytest.mark.parametrize(
    ("there", "devices", "engines"),
    [
        (host(1), "1 core", 2),
        (host(2), "2 cores", 2),
        (host(4), "4 cores", 4),
        (host(64), "64 cores", 8),
        (host(64, quota=3.5), "3 cores", 3),
        (host(64, gpus=(GPU,)), "1 GPU", 2),
        (host(4, gpus=(GPU,) * 8), "8 GPUs", 8),
    ],
)
def test_engines_are_as_many_as_devices(monkeypatch, there, devices, engines):
    monkeypatch.setattr(report, "probe", lambda: there)
    assert (str(Devices.here()), engines_here()) == (devices, engines)


def test_more_engines_than_devices_are_said(monkeypatch):
    monkeypatch.setattr(report, "probe", lambda: host(2))
    crowded = Report("demo", REPORT.rows, REPORT.figures, engines=4)
    assert "Oversubscribed: 4 engines on 2 cores." in crowded.as_text().splitlines()
    assert (crowded.as_json()["engines"], crowded.as_json()["oversubscribed"]) == (4, True)
    fitting = Report("demo", REPORT.rows, REPORT.figures, engines=2)
    assert "Oversubscribed" not in fitting.as_text()


def test_a_gpu_is_named(monkeypatch):
    monkeypatch.setattr(report, "probe", lambda: host(4, gpus=(GPU, GPU)))
    assert REPORT.as_json()["machine"]["gpus"] == "a GPU, a GPU"
