"""Several jobs on the engines of one cluster, submitted, seen and changed from a notebook."""

import pytest
from torch import nn

import workbench as wb
from workbench.hosts.processes import until
from workbench.store.errors import ClusterError

LONG_S = 120.0
NET = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
GRAPH = wb.trace(NET, input_shape=(1, 8, 8))


@pytest.fixture(scope="module")
def experiment():
    plan = wb.Plan.data_parallel(GRAPH, 1)
    return wb.Experiment(
        plan=plan, data="digits", batch_size=64, optimizer=wb.SGD(lr=0.1), steps=20
    )


@pytest.mark.slow
def test_a_sweep_shares_the_engines(cluster, experiment):
    told = []
    values = dict(lr=[0.1, 0.01], seed=[0, 1])
    sweep = cluster.jobs.sweep(experiment, module=NET, log=told.append, **values).wait(LONG_S)
    assert sorted(step["step"] for step in told) == sorted([*range(20)] * 4)
    assert len(sweep) == 4
    table = sweep.table()
    assert table["lr"].tolist() == [0.1, 0.1, 0.01, 0.01]
    assert table["seed"].tolist() == [0, 1, 0, 1]
    assert table["state"].tolist() == ["finished"] * 4
    assert table["step"].tolist() == [20] * 4
    assert (table["accuracy"] > 0).all()
    assert repr(sweep).endswith("4 of 4 runs have ended>")
    assert "accuracy" in sweep._repr_html_()
    jobs = cluster.jobs.table().set_index("job").loc[table["job"]]
    assert set(jobs["sweep"]) == {sweep.tag}
    assert (jobs["predicted_bytes"] > 0).all()
    with pytest.raises(wb.ExperimentError, match="neither an experiment nor its SGD has warmth"):
        cluster.jobs.sweep(experiment, module=NET, warmth=[1])


@pytest.mark.slow
def test_the_most_important_goes_first_and_order_can_be_changed(cluster, experiment):
    jobs, forever = cluster.jobs, experiment.replace(steps=10**6)
    busy = jobs.submit(forever.replace(plan=wb.Plan.data_parallel(GRAPH, 2)), module=NET)
    assert until(lambda: busy.state == "running", LONG_S, 0.02)
    first, second = (jobs.submit(experiment, engines=2, module=NET) for _ in range(2))
    assert until(lambda: second.state == "queued", LONG_S, 0.02)
    assert second.reason
    jobs.set_priority(second, 5)
    jobs.stop(busy)
    assert second.wait(LONG_S).state == "finished"
    assert first.wait(LONG_S).state == "finished"
    table = jobs.table().set_index("job")
    assert table.loc[second.id, "started"] < table.loc[first.id, "started"]
    assert table.loc[second.id, "priority"] == 5
    assert busy.wait(LONG_S).state == "stopped"


@pytest.mark.slow
def test_a_paused_job_goes_on_where_it_was(cluster, experiment):
    jobs = cluster.jobs
    straight = jobs.submit(experiment.replace(steps=400), module=NET).wait(LONG_S)
    run = jobs.submit(experiment.replace(steps=400), module=NET)
    assert until(lambda: bool(run.rows), LONG_S, 0.005)
    run.pause()
    assert until(lambda: run.state == "paused" or run.is_done, LONG_S, 0.02)
    assert run.state == "paused"
    assert jobs[run.id] is run  # nobody reads its rows twice
    assert cluster.occupied == {}
    with pytest.raises(ClusterError, match=r"cannot be paused|has ended"):
        jobs.pause(straight)
    run.resume()
    assert run.wait(LONG_S).state == "finished"
    columns = ["step", "rank", "loss"]
    assert run.metrics[columns].equals(straight.metrics[columns])


@pytest.mark.slow
def test_jobs_of_the_past_are_runs_too(cluster, experiment):
    run = cluster.jobs.submit(experiment, module=NET, tag="again").wait(LONG_S)
    again = cluster.jobs[run.id].wait(LONG_S)
    assert again is not run
    assert again.experiment == run.experiment
    assert again.metrics.equals(run.metrics)
    assert again.evaluation == run.evaluation
    assert again.checkpoint == run.checkpoint
    listed = next(each for each in cluster.jobs if each.id == run.id)
    assert listed.state == "finished"
    assert listed.metrics.equals(run.metrics)
    assert len(cluster.jobs) == len(cluster.jobs.table())
    assert "finished" in repr(cluster.jobs)
    assert "<table>" in cluster.jobs._repr_html_()
    with pytest.raises(KeyError, match="no job 9999"):
        cluster.jobs[9999]


@pytest.mark.slow
def test_what_has_made_all_steps_goes_on_with_more_steps_only(cluster, experiment):
    jobs = cluster.jobs
    run = jobs.submit(experiment, module=NET).wait(LONG_S)
    for go_on in (
        run.resume,
        jobs[run.id].resume,
        lambda: jobs.resume(run),
        lambda: jobs.submit(experiment, module=NET, resume=run),
        lambda: jobs.submit(experiment, module=NET, resume=run.directory),
    ):
        with pytest.raises(ClusterError, match=r"all .*steps .*are done.*replace\(steps="):
            go_on()
    more = jobs.submit(experiment.replace(steps=22), module=NET, resume=run).wait(LONG_S)
    assert more.metrics["step"].tolist() == [20, 21]


@pytest.mark.slow
def test_a_listed_run_that_was_stopped_goes_on(cluster, experiment):
    run = cluster.jobs.submit(experiment.replace(steps=400), module=NET)
    assert until(lambda: bool(run.rows), LONG_S, 0.005)
    assert run.stop() or run.wait(LONG_S).state == "stopped"
    listed = next(each for each in cluster.jobs if each.id == run.id)
    assert listed.resume().wait(LONG_S).state == "finished"
    assert listed.metrics["step"].tolist() == list(range(400))


def test_what_can_never_run_is_refused(cluster, experiment):
    jobs, before = cluster.jobs, len(cluster.jobs)
    with pytest.raises(ClusterError, match="for 3 ranks, but this cluster has 2 engines"):
        jobs.submit(experiment, engines=3, module=NET)
    with pytest.raises(TypeError, match="submit takes an Experiment"):
        jobs.submit(experiment.plan)
    cut = experiment.replace(plan=wb.Plan.hybrid(GRAPH, 2))
    with pytest.raises(ClusterError, match="cannot be made one for 1 ranks"):
        jobs.submit(cut, engines=1, module=NET)
    assert len(jobs) == before
