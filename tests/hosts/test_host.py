"""What a host offers, read from folders and drivers that are made up."""

from pathlib import Path

import pynvml
import pytest

from workbench.hosts import host
from workbench.hosts.host import cpu_quota, memory_limit, physical_cores, probe, visible_gpus


def lay_out(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_host_has_cores_and_memory():
    found = probe()
    assert found.cores
    assert found.memory_bytes > 0


def test_the_tightest_limit_of_nested_groups_counts(tmp_path):
    root = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/outer/inner/cpu.max": "max 100000\n",
            "sys/fs/cgroup/outer/memory.max": "max\n",
            "sys/fs/cgroup/outer/inner/memory.max": "1073741824\n",
        },
    )
    assert cpu_quota(root) == 1.5
    assert memory_limit(root) == 1 << 30


def test_the_older_kind_of_control_groups(tmp_path):
    root = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n2:cpu,cpuacct:/job\n0::/\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4096\n",
        },
    )
    assert cpu_quota(root) == 2.0
    assert memory_limit(root) == 4096


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert cpu_quota(tmp_path) is None
    assert memory_limit(tmp_path) is None


def test_logical_cores_of_one_physical_core_are_together(tmp_path):
    for core in range(4):
        topology = {"physical_package_id": "0", "core_id": str(core % 2)}
        lay_out(tmp_path / f"cpu{core}" / "topology", topology)
    assert physical_cores((0, 1, 2, 3), tmp_path) == ((0, 2), (1, 3))
    assert physical_cores((1, 2), tmp_path) == ((2,), (1,))


def test_unknown_topology_counts_every_core(tmp_path):
    assert physical_cores((3, 5), tmp_path) == ((3,), (5,))


@pytest.fixture
def two_gpus(monkeypatch):
    """A driver that knows two GPUs."""
    uuids = ["GPU-a", "GPU-b"]

    class Memory:
        total = 80 << 30

    def by_index(index: int) -> str:
        if index not in (0, 1):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return uuids[index]

    def by_uuid(uuid: str) -> str:
        return by_index(uuids.index(uuid) if uuid in uuids else -1)

    for name, function in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetUUID": lambda handle: handle,
        "nvmlDeviceGetName": lambda handle: f"name of {handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: Memory,
    }.items():
        monkeypatch.setattr(host.pynvml, name, function)


@pytest.mark.parametrize(
    ("visible", "tokens"),
    [
        (None, ["GPU-a", "GPU-b"]),
        ("", []),
        ("1", ["1"]),
        ("1, 0", ["1", "0"]),
        ("GPU-b", ["GPU-b"]),
        ("-1", []),
        ("0,7,1", ["0"]),  # as in CUDA, what follows an entry that is not there is not seen
        ("none", []),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_those_that_cuda_would_show(visible, tokens):
    assert [gpu.token for gpu in visible_gpus(visible)] == tokens


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_has_a_name_and_memory():
    (gpu,) = visible_gpus("1")
    assert (gpu.name, gpu.memory_bytes) == ("name of GPU-b", 80 << 30)


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    def missing() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(host.pynvml, "nvmlInit", missing)
    assert visible_gpus(None) == ()
