"""Waiting for a run: with a progress bar, or until it has made some steps."""

import asyncio

import pytest

from tests.client.fake_job import LONG_S, Job
from tests.client.interrupts import interrupt_inside
from workbench.client.run import waiting
from workbench.client.run.run import Run
from workbench.store.errors import ClusterError, RunError


def until(run, step):
    async def main():
        return await asyncio.wait_for(run.until(step=step), LONG_S)

    return asyncio.run(main())


def test_a_run_is_awaited_until_all_ranks_have_made_some_steps(start):
    job = Job()
    run = start(job)
    assert until(run, 1) is run
    assert not run.is_done
    job.may_end.set()
    assert until(run, 2) is run
    with pytest.raises(ClusterError, match="ended before 3 steps were made"):
        until(run, 3)


def test_a_run_that_fails_before_raises_that(start):
    job = Job(RunError("rank 1 failed"))
    job.may_end.set()
    run = start(job)
    assert until(run, 2) is run
    with pytest.raises(RunError, match="rank 1 failed"):
        until(run, 3)


@pytest.mark.parametrize("step", [0, 4, True, 1.0, None])
def test_a_step_that_the_experiment_does_not_have_is_refused(start, step):
    run = start(Job(None))
    with pytest.raises(ValueError, match="from 1 to the 3 of this run"):
        until(run, step)
    run.wait(LONG_S)


def test_whoever_gives_up_waiting_leaves_the_run_alone(start):
    job = Job()
    run = start(job)

    async def main():
        await asyncio.wait_for(run.until(step=2), 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(main())

    async def run_cell_async():  # ipykernel's name for a cell that awaits
        try:
            await run.until(step=2)
        except KeyboardInterrupt as interrupt:
            return str(interrupt)

    async def kernel():
        cell = asyncio.ensure_future(run_cell_async())
        asyncio.get_running_loop().call_later(0.01, cell.cancel)
        return await cell

    assert asyncio.run(kernel()) == "interrupted; the run goes on"
    assert not run.is_stopping
    job.may_end.set()
    assert run.wait(LONG_S).state == "finished"


def test_a_bar_shows_state_steps_and_loss(start, capsys):
    job = Job()
    job.may_end.set()
    assert start(job).wait(LONG_S, progress=True).state == "finished"
    said = capsys.readouterr().err
    assert "finished:" in said
    assert "2/3" in said
    assert "loss=" not in said
    assert "loss 0.5" in said


def test_a_bar_can_be_interrupted(start, capsys):
    run = start(Job())
    interrupt_inside(Run.wait, waiting.follow)
    with pytest.raises(KeyboardInterrupt, match="engines stop after their current step"):
        run.wait(progress=True)
    assert run.wait(LONG_S).state == "stopped"


def test_where_nobody_would_see_it_there_is_no_bar(start, capsys):
    job = Job()
    job.may_end.set()
    start(job).wait(LONG_S)
    assert capsys.readouterr().err == ""
