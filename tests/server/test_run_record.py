"""What a run's folder says of its end, for whoever has no cluster."""

from pathlib import Path

from tests.server.fake_tasks import value_after
from workbench.store.run_folder import RunOutcome


def outcome_of(record):
    return RunOutcome.load(Path(record.directory))


def test_a_finished_run_s_folder_says_what_its_ranks_reported(fake):
    record = fake.ended(fake.submit(keywords={"steps": 12}))
    found = outcome_of(record)
    assert (found.job, found.state, found.step) == (record.id, "finished", 12)
    assert [rank.evaluation for rank in found.ranks] == [{"value": value_after(12)}] * 2
    assert found.attempts == record.attempts


def test_a_failed_run_s_folder_says_why(fake):
    record = fake.ended(fake.submit("fail"))
    found = outcome_of(record)
    assert (found.state, found.error, found.ranks) == ("failed", record.error, ())


def test_a_run_that_goes_on_takes_back_how_it_ended(fake):
    job = fake.submit(keywords={"steps": 1000, "every": 1000})
    record = fake.at_step(job, 5)
    assert outcome_of(record) is None
    assert fake.ask("stop", job) == ""
    record = fake.ended(job)
    assert outcome_of(record).state == "stopped"
    assert fake.ask("resume", job) == ""
    fake.at_step(job, record.step + 1)
    assert outcome_of(record) is None
    assert fake.ask("cancel", job) == ""
    assert outcome_of(fake.ended(job)).state == "cancelled"


def test_calls_leave_none(fake):
    record = fake.ended(fake.submit("answer", kind="call"))
    assert outcome_of(record) is None
