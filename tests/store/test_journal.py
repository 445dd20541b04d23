"""Events, commands, messages, owners and notes."""

import subprocess
import sys

import pytest

from workbench.store import journal
from workbench.store.errors import ControlMessageTooLarge, StoreError
from workbench.store.owner import Owner
from workbench.store.record import Tally
from workbench.store.store import Store


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "server.sqlite", create=True)
    yield store
    store.close()


def test_events_come_in_order_and_by_job(store):
    store.event("began", kind="start", job=1)
    store.event("slow", kind="straggler", level="warning", job=2, engine=3)
    store.event("done", kind="end", job=1)
    assert [each.text for each in store.events()] == ["began", "slow", "done"]
    assert [each.text for each in store.events(after=1)] == ["slow", "done"]
    assert [each.text for each in store.events(job=1)] == ["began", "done"]
    assert [each.text for each in store.events(limit=1)] == ["done"]
    (slow,) = store.events(job=2)
    assert (slow.level, slow.kind, slow.engine) == ("warning", "straggler", 3)


def test_old_events_are_forgotten(store, monkeypatch):
    monkeypatch.setattr(journal, "EVENTS_KEPT", 3)
    for number in range(5):
        store.event(str(number), kind="test")
    assert [each.text for each in store.events()] == ["2", "3", "4"]


def test_commands_are_carried_out_in_order(store):
    first, second = store.command("stop", 4), store.command("priority", 4, priority=2)
    assert [each.id for each in store.commands()] == [first, second]
    assert store.commands()[1].payload == {"priority": 2}
    store.answer_command(first, "it has ended")
    assert [each.id for each in store.commands()] == [second]
    answered = store.command_of(first)
    assert (answered.kind, answered.job, answered.error) == ("stop", 4, "it has ended")
    assert answered.done_at >= answered.at
    with pytest.raises(StoreError, match="holds no command 9"):
        store.command_of(9)


def test_messages_are_counted_and_large_ones_refused(store):
    store.count_message("sent", 100, job=1)
    store.count_message("sent", 20, job=1)
    store.count_message("received", 7, job=2)
    store.count_message("received", 90_000, messages=2)
    assert store.ledger(1) == {"sent": Tally(2, 120), "received": Tally()}
    assert store.ledger() == {"sent": Tally(2, 120), "received": Tally(3, 90_007)}
    with pytest.raises(ControlMessageTooLarge, match="of job 1 of 65,537 bytes"):
        store.count_message("sent", 65_537, job=1)
    with pytest.raises(ControlMessageTooLarge, match="command 'stop'"):
        store.command("stop", 1, why="x" * 70_000)
    assert store.ledger(1)["sent"] == Tally(2, 120)
    with pytest.raises(ValueError, match="'sent' or 'received'"):
        store.count_message("lost", 1)


def test_notes(store):
    assert store.meta("meeting") is None
    store.set_meta("meeting", "127.0.0.1:1")
    store.set_meta("meeting", "127.0.0.1:2")
    assert store.meta("meeting") == "127.0.0.1:2"
    store.set_meta("meeting", None)
    assert store.meta("meeting") is None


def test_owners_are_known_by_more_than_their_number(store):
    here = Owner.here()
    store.attach(here)
    store.attach(here)
    assert store.owners() == (here,)
    assert here.is_alive
    assert not Owner(here.pid, here.started + 1, here.host).is_alive
    assert Owner(here.pid, 0, "elsewhere").is_alive
    store.detach(here)
    assert store.owners() == ()


def test_an_owner_that_ended_is_noticed_even_before_it_was_collected():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner.of(process.pid)
    assert owner.is_alive
    process.kill()
    while owner.is_alive:  # until the signal has arrived
        pass
    process.communicate()
    with pytest.raises(ProcessLookupError, match="no process"):
        Owner.of(process.pid)
