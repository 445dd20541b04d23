"""Commands for people without a notebook."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import workbench as wb
from tests.client.fake_job import Job
from tests.plan.graphs import mlp
from tests.store.test_messages import experiment as toy
from workbench.__main__ import main
from workbench.client.commands import Progress
from workbench.client.lifecycle import end
from workbench.client.run.run import Run

ROOT = Path(__file__).resolve().parents[2]
LONG_S = 300.0


@pytest.fixture
def experiment(tmp_path):
    graph = wb.trace("mobilenet_v3_small", input_shape=(3, 32, 32), num_classes=10)
    plan = wb.Plan.data_parallel(graph, 1)
    made = wb.Experiment(plan=plan, data="digits", batch_size=4, optimizer=wb.SGD(lr=0.1), steps=3)
    made.save(tmp_path / "experiment.toml")
    plan.save(tmp_path / "plan.toml")
    return made


@pytest.fixture
def start(tmp_path):
    """`start("run", ...)` -> the process of that command."""
    started = []

    def start(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "workbench", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for folder in tmp_path.glob("*/.cluster-*"):
        end(folder, at_once=True)


@pytest.fixture
def follow(tmp_path):
    """`follow(job)` -> a run of three steps on two ranks."""
    plan = wb.Plan.data_parallel(mlp(4, 4), 2)
    return lambda job: Run(toy(plan), tmp_path, job, lambda _run: job)


@pytest.mark.parametrize("command", ["predict", "program", "verify", "run"])
def test_what_a_file_names_is_not_imported_without_trust(tmp_path, command):
    (tmp_path / "planted.py").write_text("print('executed')")
    graph = wb.trace("mobilenet_v3_small", input_shape=(3, 32, 32), num_classes=10)
    text = wb.Plan.hybrid(graph, 2).to_toml().replace('"shard_out"', '"planted:Scheme"')
    if command == "run":
        text += "\n[experiment]\ndata = 'digits'\noptimizer = 'sgd'\nsteps = 1\n"
    (tmp_path / "plan.toml").write_text(text)
    done = command_of(tmp_path, command, "plan.toml")
    assert "planted:Scheme' is named in a text" in done.stderr
    assert "executed" not in done.stdout
    assert "executed" in command_of(tmp_path, command, "plan.toml", "--trust").stdout


def command_of(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    return subprocess.run(
        [sys.executable, "-m", "workbench", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_that_is_written_over(follow):
    job, stream = Job(held=True), Terminal()
    run = follow(job)
    progress = Progress(run, stream)
    progress.show()
    assert stream.getvalue() == f"\r[{'.' * 28}] 0 of 3, starting"
    job.may_end.set()
    job.may_begin.set()
    progress.follow()
    told = stream.getvalue()
    assert told.endswith("2 of 3, finished, loss 0.5, 0.5 samples/s, test accuracy 75.0%\n")
    assert told.count("\n") == 1


def test_progress_is_a_few_lines_where_none_can_be_written_over(follow):
    job, stream = Job(), io.StringIO()
    job.may_end.set()
    Progress(follow(job), stream).follow()
    assert "\r" not in stream.getvalue()
    assert 1 <= len(stream.getvalue().splitlines()) <= 3


@pytest.mark.slow
def test_a_plan_is_predicted(experiment, tmp_path, capsys):
    assert main(["predict", str(tmp_path / "plan.toml"), "--machine", "h100-nvlink"]) == 0
    with_time = capsys.readouterr().out
    assert "mobilenet_v3_small" in with_time
    assert main(["predict", str(tmp_path / "experiment.toml")]) == 0
    assert capsys.readouterr().out != with_time


@pytest.mark.slow
def test_a_program_is_listed(experiment, tmp_path, capsys):
    assert main(["program", str(tmp_path / "experiment.toml")]) == 0
    every = capsys.readouterr().out
    assert "backward" in every
    assert main(["program", str(tmp_path / "experiment.toml"), "--rank", "0"]) == 0
    assert "rank 0 of" in capsys.readouterr().out
    assert main(["program", str(tmp_path / "experiment.toml"), "--rank", "99"]) == 1
    assert "no rank 99" in capsys.readouterr().err


def test_what_cannot_be_is_told_in_one_line(tmp_path, capsys):
    assert main(["predict", str(tmp_path / "nowhere.toml")]) == 1
    assert "nowhere.toml" in capsys.readouterr().err
    assert main(["attach", "nowhere"]) == 1
    assert "there is no cluster 'nowhere'" in capsys.readouterr().err
    assert main(["jobs"]) == 0
    with pytest.raises(SystemExit):
        main([])


@pytest.mark.slow
def test_an_experiment_is_run_followed_and_seen(experiment, start, tmp_path):
    ran = start("run", "experiment.toml", "--cluster", "cli-run")
    out, error = ran.communicate(timeout=LONG_S)
    assert ran.returncode == 0, error
    assert "job 1 of cluster cli-run" in error
    assert "3 of 3, finished" in error
    assert out.startswith("finished: ")
    seen = start("jobs")
    out, error = seen.communicate(timeout=LONG_S)
    assert "cli-run" in out, error
    assert "mobilenet_v3_small" in out
    assert "3 of 3" in out


@pytest.mark.slow
def test_an_interrupt_leaves_a_checkpoint_and_attach_leaves_a_run_alone(
    experiment, start, tmp_path
):
    experiment.replace(steps=10**6).save(tmp_path / "experiment.toml")
    detached = start("run", "experiment.toml", "--cluster", "cli-long", "--detach")
    _out, error = detached.communicate(timeout=LONG_S)
    assert detached.returncode == 0, error
    for command, said in (
        (("attach", "cli-long"), "left; it goes on"),
        (("run", "experiment.toml", "--cluster", "cli-long", "--resume", "never"), "never"),
    ):
        process = start(*command)
        if command[0] == "attach":
            assert "job 1" in process.stderr.readline()
            time.sleep(1.0)
            process.send_signal(signal.SIGINT)
        _out, error = process.communicate(timeout=LONG_S)
        assert said in error
    with wb.Cluster.attach("cli-long") as cluster:
        run = cluster.jobs[1]
        assert not run.is_done
        run.stop()
        assert run.wait(LONG_S).state == "stopped"
        assert run.checkpoint is not None
