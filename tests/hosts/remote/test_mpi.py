"""Engines that mpirun has started."""

import shutil

import pytest

import workbench as wb
from tests.hosts.remote.training import trains

# Of Open MPI, which wants to be told that it may run as root.
ARGUMENTS = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
CONFIG = f"""
c = get_config()
c.Cluster.engine_launcher_class = "mpi"
c.MPIEngineSetLauncher.mpi_args = {ARGUMENTS}
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun here (package openmpi-bin)")
def test_a_split_trains_and_is_exact(tmp_path):
    (tmp_path / "ipcluster_config.py").write_text(CONFIG)
    with wb.Cluster(2, profile=str(tmp_path), directory=tmp_path / "runs") as cluster:
        trains(cluster)
