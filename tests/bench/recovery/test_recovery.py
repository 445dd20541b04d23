"""Kills of real engines, and of the server, while real ranks train."""

import json

import pytest

from workbench.bench.__main__ import main
from workbench.bench.recovery.kills import Target
from workbench.bench.recovery.recovery import BLOCK, costs_in
from workbench.store.record import AttemptRecord


def attempt(number, reason, *, is_lost=True):
    return AttemptRecord(number, (0, 1), 0.0, 1.0, reason=reason, is_lost=is_lost)


def test_an_attempt_more_is_counted_unless_an_engine_was_killed_before_it():
    target = Target(None, None, None, None, killed={17})
    died = attempt(1, "rank 1 (pid 17) died: its process was ended by SIGKILL")
    others = (
        attempt(1, "rank 1 (pid 171) died: its process was ended by SIGKILL"),
        attempt(1, "rank 0 failed: PeerLost: rank 1 is gone"),
        attempt(1, "rank 1 (pid 17) was interrupted", is_lost=False),
    )
    assert target.was_killed(died)
    assert not any(target.was_killed(other) for other in others)


def test_what_checkpoints_cost_is_told_by_steps_with_and_without_in_turns():
    took = [9.0] * 2 * BLOCK + ([1.5] + [1.0] * (BLOCK - 1) + [1.0] * BLOCK) * 3
    rows = [
        {"step": step, "rank": rank, "time": sum(took[: step + 1])}
        for step in range(len(took))
        for rank in (0, 1)
    ]
    assert costs_in(rows) == pytest.approx([0.5 / BLOCK] * 3)


@pytest.mark.slow
def test_what_is_killed_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["recovery", "--quick", "--json", "found.json"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["figures"]["kills_survived"]["min"] == 1.0
    kills = [row for row in found["rows"] if "kind" in row]
    assert {row["kind"] for row in kills} == {
        "engine SIGKILL",
        "engine SIGSTOP",
        "server SIGKILL",
        "supervisor SIGKILL",
        "controller SIGKILL",
    }
    stumbles = [row for row in found["rows"] if "hiccup" in row]
    assert [(row["goes on"], row["attempts lost"]) for row in stumbles] == [("yes", 0)] * 2
    assert found["figures"]["hiccups_lost"]["max"] == 0
    assert found["figures"]["hiccups_loss_difference"]["max"] == 0
    hit = [row for row in found["rows"] if "came" in row]
    assert {row["kept"] for row in hit} == {1}
    assert {row["process"] for row in hit} >= {"engine", "clock"}
    assert found["figures"]["faults_left_behind"]["max"] == 0
