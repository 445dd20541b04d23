"""Logs that are files."""

import json
import math
import sys
from types import ModuleType

import pytest

import workbench as wb
from workbench.client.loggers.feed import Feed
from workbench.client.loggers.logger import loggers
from workbench.client.run.rows import Rows


def read(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_json_lines_are_added_and_what_is_no_number_is_null(played, tmp_path):
    path = tmp_path / "logs" / "steps.jsonl"
    for accuracy, loss in ((math.nan, 1.0), (0.5, math.nan)):
        played.subscribe(Feed(played, loggers(wb.JSONLines(path))))
        played.step(0, accuracy=accuracy, loss=loss)
        played.end()
        played.told.clear()
        played.rows = Rows()
    first, second = read(path)
    assert (first["step"], first["loss"], "accuracy" in first) == (0, 1.0, False)
    assert (second["loss"], second["accuracy"]) == (None, 0.5)
    assert played.notes == []


def test_json_lines_are_whole_while_the_run_goes_on(played, tmp_path):
    path = tmp_path / "steps.jsonl"
    seen = []

    def look(step):
        seen.append(read(path))

    played.subscribe(Feed(played, loggers([wb.JSONLines(path), look])))
    played.step(0)
    played.step(1)
    played.end()
    assert [len(lines) for lines in seen] == [1, 2]


class Writer:
    """As torch's SummaryWriter, which needs tensorboard."""

    made: list["Writer"]

    def __init__(self, folder):
        self.folder, self.said, self.closed = folder, [], False
        self.made.append(self)

    def add_text(self, tag, text):
        self.text = text

    def add_scalar(self, tag, value, step, walltime=None):
        self.said.append((tag, value, step))

    def close(self):
        self.closed = True


def test_tensorboard_gets_a_curve_for_each_column(played, tmp_path, monkeypatch):
    Writer.made = []
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr("workbench.client.records.optional.find_spec", lambda _name: module)
    played.subscribe(Feed(played, loggers(wb.TensorBoard(tmp_path))))
    played.step(0, loss=2.0)
    played.step(1, loss=1.0)
    played.end(accuracy=0.75)
    (writer,) = Writer.made
    assert writer.folder == str(tmp_path / played.directory.name)
    assert [said for said in writer.said if said[0] == "loss"] == [
        ("loss", 2.0, 0),
        ("loss", 1.0, 1),
    ]
    assert writer.said[-1] == ("test/accuracy", 0.75, 1)
    assert "| batch_size |" in writer.text
    assert writer.closed
    assert {"step", "time", "rank"}.isdisjoint(tag for tag, _, _ in writer.said)
    assert played.notes == []
