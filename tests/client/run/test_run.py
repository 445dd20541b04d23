"""A run as the notebook sees it, with a job that is played by the test."""

import asyncio
import threading
from pathlib import Path

import pytest

from tests.client.fake_job import LONG_S, Job
from tests.client.interrupts import interrupt_inside
from workbench.client.run.run import Run
from workbench.plan.experiment.metrics import COLUMNS
from workbench.store.errors import ClusterError, Diverged, RunError


def test_a_run_starts_runs_and_finishes(start, tmp_path):
    job, is_running = Job(held=True), threading.Event()
    run = start(job)
    assert run.state == "starting"
    assert run.id == 7
    assert "starting" in repr(run)
    run.subscribe(lambda _rows: is_running.set())
    job.may_begin.set()
    assert is_running.wait(LONG_S)
    assert run.state == "running"
    job.may_end.set()
    assert run.wait(LONG_S) is run
    assert (run.state, run.is_done, run.error) == ("finished", True, None)
    assert run.evaluation == {"accuracy": 0.75}
    assert run.checkpoint == Path("step-2")
    assert "finished, step 2 of 3" in repr(run)
    assert "accuracy 75.0%" in repr(run)
    assert (tmp_path / "metrics.csv").read_text().splitlines()[0] == ",".join(COLUMNS)


def test_metrics_are_sorted_and_have_all_columns_even_when_there_are_none(start):
    run = start(Job(None))
    run.wait(LONG_S)
    assert (run.state, list(run.metrics.columns), len(run.metrics)) == ("stopped", [*COLUMNS], 0)
    assert run.checkpoint is None
    job = Job()
    job.may_end.set()
    metrics = start(job).wait(LONG_S).metrics
    assert list(metrics.columns) == [*COLUMNS]
    assert metrics[["step", "rank"]].to_numpy().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert metrics["step"].dtype.kind == "i"
    metrics["loss"] = 0.0  # a copy: nobody else's metrics change


def test_metrics_are_not_built_anew_for_every_look(start, monkeypatch):
    job = Job()
    job.may_end.set()
    run = start(job).wait(LONG_S)
    run.metrics  # noqa: B018
    monkeypatch.setattr("pandas.DataFrame.sort_values", None)
    assert len(run.metrics) == 4


def test_subscribers_get_new_rows_and_changes_of_state(start):
    job, seen, is_running = Job(held=True), [], threading.Event()
    run = start(job)

    def watch(rows: list) -> None:
        seen.append((run.state, [r["step"] for r in rows]))
        is_running.set()

    unsubscribe = run.subscribe(watch)
    quiet = run.subscribe(lambda _rows: pytest.fail("called after it was unsubscribed"))
    quiet()
    job.may_begin.set()
    assert is_running.wait(LONG_S)
    job.may_end.set()
    run.wait(LONG_S)
    assert seen == [("running", []), ("running", [0, 0]), ("running", [1, 1]), ("finished", [])]
    unsubscribe()
    unsubscribe()


def test_a_broken_subscriber_does_not_hurt_the_run(start):
    job = Job(held=True)
    job.may_end.set()
    run = start(job)
    run.subscribe(lambda rows: rows[7])
    job.may_begin.set()
    run.wait(LONG_S)
    assert run.state == "finished"
    assert len(run.notes) == 1
    assert "IndexError" in run.notes[0]
    assert "a subscriber failed" in run._repr_html_()


def test_a_failed_run_raises_when_waited_for_and_keeps_its_rows(start, tmp_path):
    job = Job(RunError("rank 1 failed: <oops>\nTraceback ..."))
    job.may_end.set()
    run = start(job)
    with pytest.raises(RunError, match="oops"):
        run.wait(LONG_S)
    assert run.state == "failed"
    assert run.error is job.ending
    assert len(run.rows) == 4
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 5
    assert "rank 1 failed: <oops>" in repr(run)
    assert "Traceback" not in repr(run)
    assert "rank 1 failed: &lt;oops&gt;" in run._repr_html_()


def test_a_run_says_why_it_waits_and_what_happened(start):
    job = Job(held=True)
    run = start(job)
    assert job.is_watched.wait(LONG_S)
    told: list[str] = []
    run.subscribe(lambda _rows: told.append(run.state))
    job.listener.turn("queued", "2 engines are needed, 1 is free")
    assert (run.state, run.reason) == ("queued", "2 engines are needed, 1 is free")
    assert "queued: 2 engines are needed" in repr(run)
    assert "queued: 2 engines are needed" in run._repr_html_()
    job.listener.turn("starting", "")
    job.listener.turn("starting", "")
    job.listener.note("attempt 1, after 3 steps: rank 1 died")
    assert run.notes == ["attempt 1, after 3 steps: rank 1 died"]
    assert told == ["queued", "starting", "starting"]
    job.may_end.set()
    job.may_begin.set()
    assert run.wait(LONG_S).state == "finished"
    assert run.reason == ""


def test_a_run_is_paused_and_resumed(start):
    job, running = Job(held=True), threading.Event()
    run = start(job)
    run.subscribe(lambda rows: running.set() if rows else None)
    job.may_begin.set()
    assert running.wait(LONG_S)
    run.pause()
    assert (run.state, run.is_done, run.is_stopping) == ("paused", False, False)
    assert run.resume() is run
    assert run.state == "running"
    job.may_end.set()
    assert run.wait(LONG_S).state == "finished"
    run.pause()
    assert run.state == "finished"


def test_a_loss_that_is_no_number_is_an_error(start):
    job = Job("diverged")
    job.may_end.set()
    run = start(job)
    with pytest.raises(Diverged, match="why"):
        run.wait(LONG_S)
    assert run.state == "failed"
    assert run.checkpoint == Path("step-2")


def test_stop_reaches_the_job_and_may_be_repeated(start):
    job = Job()
    run = start(job)
    run.stop()
    run.stop()
    assert run.wait(LONG_S).state == "stopped"
    assert job.asked_to_stop.is_set()
    run.stop()
    assert run.state == "stopped"


def test_a_run_stopped_while_it_starts_says_so(start):
    job = Job(held=True)
    run = start(job)
    run.stop()
    assert "starting (stopping)" in repr(run)
    job.may_begin.set()
    assert run.wait(LONG_S).state == "stopped"


def test_waiting_may_end_before_the_run_does(start):
    job = Job()
    run = start(job)
    with pytest.raises(TimeoutError, match=r"goes on after 0\.01 s"):
        run.wait(0.01)
    assert not run.is_stopping
    job.may_end.set()
    run.wait(LONG_S)


def test_an_interrupt_while_waiting_stops_the_run(start):
    run = start(Job())
    interrupt_inside(Run.wait, threading.Event.wait)  # not before it is ready for that
    with pytest.raises(KeyboardInterrupt, match="engines stop after their current step"):
        run.wait()
    assert run.is_stopping
    assert run.wait(LONG_S).state == "stopped"


def test_a_run_can_be_awaited(start):
    job = Job()
    run = start(job)

    async def cell() -> Run:
        asyncio.get_running_loop().call_later(0.01, job.may_end.set)
        return await run

    assert asyncio.run(cell()) is run
    failing = Job(RunError("why"))
    failing.may_end.set()
    with pytest.raises(RunError, match="why"):
        asyncio.run(wait_for(start(failing)))


async def wait_for(run: Run) -> Run:
    return await run


def test_a_cancelled_cell_is_an_interrupt(start):
    run = start(Job())

    async def run_cell_async() -> str:  # ipykernel's name for a cell that awaits
        try:
            await run
        except KeyboardInterrupt as interrupt:
            return str(interrupt)
        return ""

    async def kernel() -> str:
        cell = asyncio.ensure_future(run_cell_async())
        asyncio.get_running_loop().call_later(0.01, cell.cancel)
        return await cell

    assert "engines stop after their current step" in asyncio.run(kernel())
    assert run.wait(LONG_S).state == "stopped"


def test_a_cancelled_task_elsewhere_stays_a_cancellation(start):
    run = start(Job())

    async def main() -> None:
        await asyncio.wait_for(wait_for(run), 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert run.wait(LONG_S).state == "stopped"


def test_metrics_that_cannot_be_written_are_not_lost(start, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workbench.store.run_folder.write_whole", full)
    job = Job()
    job.may_end.set()
    run = start(job).wait(LONG_S)
    assert run.state == "finished"
    assert "No space left" in run.notes[0]
    assert len(run.metrics) == 4


def test_the_rich_form_has_a_line_for_each_rank(start):
    job = Job()
    job.may_end.set()
    html = start(job).wait(LONG_S)._repr_html_()
    assert html.count("<tr>") == 3
    assert "0.5 samples/s" in html
    assert "<script" not in html


def test_weights_of_a_run_without_a_checkpoint(start):
    run = start(Job(None)).wait(LONG_S)
    with pytest.raises(ClusterError, match="has no checkpoint: a run leaves one every"):
        run.state_dict()
