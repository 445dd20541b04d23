"""Engines that Slurm has started: two on each of two nodes, for a limited time."""

import time

import pytest

import workbench as wb
from tests.hosts.remote.slurm import slurm, why_not
from tests.hosts.remote.training import NET, experiment, trains, until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]

LIMIT_MINUTES = 3
FOR_WORK_S = 90.0
CONFIG = '''
c = get_config()
c.Cluster.engine_launcher_class = "slurm"
c.SlurmEngineSetLauncher.batch_template = """#!/bin/sh
#SBATCH --job-name=workbench
#SBATCH --nodes=2
#SBATCH --ntasks={{n}}
#SBATCH --time={minutes}
#SBATCH --output={{output_file}}
srun {{program_and_args}}
"""
'''


def test_a_run_trains_and_leaves_a_checkpoint_before_its_time_is_over(tmp_path, monkeypatch):
    (tmp_path / "ipcluster_config.py").write_text(CONFIG.format(minutes=LIMIT_MINUTES))
    profile = wb.Profile(str(tmp_path), notice_s=60 * LIMIT_MINUTES - FOR_WORK_S)
    with slurm() as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        began = time.time()
        with wb.Cluster(4, profile=profile, directory=tmp_path, timeout=60.0) as cluster:
            hosts = [device.host for device in cluster.devices]
            assert hosts == ["node0", "node0", "node1", "node1"]
            assert abs(cluster.ends_at - began - 60 * LIMIT_MINUTES) < 60
            trains(cluster)
            run = cluster.train(experiment().replace(steps=1_000_000), module=NET)
            until(lambda: run.state == "paused", cluster)
            assert time.time() < cluster.ends_at
            if run.metrics.empty:
                pytest.skip(f"this machine did not get to a first step in {FOR_WORK_S:g} s")
            (checkpoint,) = run.directory.glob("step-*")
            assert int(checkpoint.name.removeprefix("step-")) == run.metrics.step.max() + 1
        until(lambda: "workbench" not in running.call("squeue", "--states=R,PD"), cluster)
