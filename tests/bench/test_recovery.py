"""Kills of real engines, and of the server, while real ranks train."""

import json

import pytest

from workbench.bench.__main__ import main


@pytest.mark.slow
def test_what_is_killed_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["recovery", "--quick", "--json", "found.json"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["figures"]["kills_survived"]["min"] == 1.0
    assert {row["kind"] for row in found["rows"]} == {
        "engine SIGKILL",
        "engine SIGSTOP",
        "server SIGKILL",
    }
