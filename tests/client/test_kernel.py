"""A cluster in a real notebook kernel, whose event loop runs while a cell does."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

from workbench.client.cluster import Cluster
from workbench.store.errors import ClusterError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(ROOT))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def execute(client: BlockingKernelClient, code: str) -> str:
    """What a cell showed: its text, or its error's name and text."""
    shown: list[str] = []

    def collect(message: dict) -> None:
        content = message["content"]
        if message["msg_type"] == "stream":
            shown.append(content["text"])
        elif message["msg_type"] == "execute_result":
            shown.append(content["data"]["text/plain"])
        elif message["msg_type"] == "error":
            shown.append(f"{content['ename']}: {content['evalue']}")

    client.execute_interactive(code, timeout=120, output_hook=collect, allow_stdin=False)
    return "".join(shown)


@pytest.mark.slow
def test_a_cluster_in_a_notebook(kernel, tmp_path):
    manager, client = kernel
    pid = manager.provisioner.pid
    assert execute(client, "from tests.client.owner import busy") == ""
    cell = f"cluster, run = busy({str(tmp_path / 'runs')!r}, name='kernel'); cluster"
    assert execute(client, cell).startswith("<Cluster of 2 engines on ")
    # The interrupt: from another thread of the kernel, because it must come while the cell awaits.
    interrupted = execute(
        client,
        "import os, signal, threading\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "await run",
    )
    assert interrupted.startswith("KeyboardInterrupt: interrupted; the engines stop")
    assert execute(client, "(await run).state") == "'stopped'"
    again = "from tests.store.test_messages import experiment\nrun = cluster.train(run.experiment)"
    assert execute(client, again) == ""
    assert execute(client, "run.state in ('starting', 'running')") == "True"
    assert execute(client, "from tests.client.owner import rows_of\nrows_of(run)") == ""
    os.kill(pid, signal.SIGKILL)
    manager.restart_kernel(now=True)
    client.wait_for_ready(timeout=60)
    # What the notebook's second life finds: the run went on, with all that it had measured.
    found = "import workbench as wb\ncluster = wb.Cluster.attach('kernel'); run = cluster.jobs[2]"
    assert execute(client, found) == ""
    assert execute(client, "from tests.client.owner import rows_of\nrows_of(run)") == ""
    assert execute(client, "run.state, run.rows[0]['step'], run.notes") == "('running', 0, [])"
    still = "view = wb.Dashboard(run); len(view.series['step']) > 0"
    assert execute(client, still) == "True"
    assert execute(client, "run.stop(); (await run).state") == "'stopped'"
    assert (
        execute(client, "[job.state for job in cluster.jobs.records]") == "['stopped', 'stopped']"
    )
    assert execute(client, "cluster.stop()") == ""
    assert list((tmp_path / "runs").glob(".cluster-*")) == []
    with pytest.raises(ClusterError, match="there is no cluster 'kernel'"):
        Cluster.attach("kernel")
