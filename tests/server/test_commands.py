"""What people ask for; and that calls end with those who wait for them."""

import os
import subprocess
import sys

import pytest

from tests.server.fake_tasks import value_after
from tests.server.test_recovery import value
from workbench.store.process import ProcessIdentity


@pytest.mark.slow
def test_pause_and_resume(fake):
    job = fake.submit(keywords={"steps": 60, "every": 100})
    fake.at_step(job, 10)
    assert fake.ask("pause", job) == ""
    record = fake.until(job, "paused")
    assert record.held == ()
    assert record.checkpoint is not None
    assert [engine.state for engine in fake.store.engines()] == ["idle"] * 3
    assert fake.ask("resume", job) == ""
    record = fake.ended(job)
    assert (record.state, record.attempt, value(record)) == ("finished", 2, value_after(60))


def test_stop_leaves_a_checkpoint(fake):
    job = fake.submit(keywords={"steps": 1000, "every": 1000})
    fake.at_step(job, 10)
    assert fake.ask("stop", job) == ""
    record = fake.ended(job)
    assert record.state == "stopped"
    assert record.checkpoint.endswith(f"step-{record.step:06d}")
    assert fake.ask("resume", job) == ""
    fake.at_step(job, 40)
    assert fake.ask("cancel", job) == ""
    assert fake.ended(job).state == "cancelled"


def test_what_waits_ends_at_once(fake):
    first = fake.submit(keywords={"steps": 400})
    fake.until(first, "running")
    second, third = fake.submit(), fake.submit()
    assert fake.ask("pause", second) == ""
    assert fake.store.job(second).state == "paused"
    assert fake.ask("stop", third) == ""
    assert fake.store.job(third).state == "stopped"
    assert fake.ask("stop", first) == ""
    assert fake.ended(first).state == "stopped"
    assert fake.ask("resume", second) == ""
    assert fake.ended(second).state == "finished"


def test_what_cannot_be_is_said(fake):
    job = fake.submit(keywords={"steps": 1})
    fake.ended(job)
    assert "has ended" in fake.ask("pause", job)
    assert "all steps" in fake.ask("resume", job)
    assert "no job 99" in fake.ask("stop", 99)
    assert "no command 'dance'" in fake.ask("dance", job)
    assert "says of which job" in fake.ask("stop")
    assert "no lease" in fake.ask("release", job)


def test_calls_under_a_lease(fake):
    lease = fake.submit("", kind="lease")
    places = fake.until(lease, "running").held
    call = fake.submit("answer", kind="call", places=places, lease=lease)
    record = fake.ended(call)
    assert (record.state, record.reason) == ("finished", "")
    failing = fake.ended(fake.submit("fail", kind="call", places=places, lease=lease))
    assert (failing.state, failing.error.kind) == ("failed", "ValueError")
    assert fake.ask("release", lease) == ""
    assert fake.ended(lease).state == "finished"
    late = fake.ended(fake.submit("answer", kind="call", places=places, lease=lease))
    assert late.state == "cancelled"


@pytest.mark.slow
def test_a_call_ends_with_who_waits_for_it(fake):
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as waiting:
        call = fake.submit("sleep", kind="call", owner=ProcessIdentity.of(waiting.pid))
        fake.until(call, "running")
        waiting.kill()
    record = fake.ended(call)
    assert record.state == "cancelled"
    assert all(os.path.exists(f"/proc/{engine.pid}") for engine in fake.store.engines())
    assert fake.ended(fake.submit(keywords={"steps": 2})).state == "finished"
