"""A run that has ended goes on, with a job that is played by the test."""

import pytest

from tests.client.fake_job import LONG_S, Job
from workbench.store.errors import ClusterError, RunError


def test_a_stopped_run_goes_on(start, tmp_path):
    run = start(Job())
    states: list[str] = []
    run.subscribe(lambda _rows: states.append(run.state))
    with pytest.raises(ClusterError, match="has not ended"):
        run.resume()
    run.stop()
    run.wait(LONG_S)
    assert run.state == "stopped"
    start.next_job = Job()
    start.next_job.may_end.set()
    assert run.resume() is run
    assert run.wait(LONG_S) is run
    assert (run.state, run.error) == ("finished", None)
    assert states.index("stopped") < states.index("starting") < states.index("finished")
    # Steps 0 and 1 were run twice: each rank's row counts once.
    assert len(run.rows) == 8
    assert run.metrics[["step", "rank"]].values.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    with pytest.raises(ClusterError, match="all 3 steps are done"):
        run.resume()


def test_a_failed_run_goes_on(start):
    job = Job(RunError("rank 1 fell over"))
    run = start(job)
    job.may_end.set()
    with pytest.raises(RunError, match="fell over"):
        run.wait(LONG_S)
    start.next_job = Job()
    start.next_job.may_end.set()
    assert run.resume().wait(LONG_S).state == "finished"
