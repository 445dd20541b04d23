"""Control groups of emulated hosts, in folders that are made up; test_hosts.py has real ones."""

from pathlib import Path

import pytest

from tests.hosts.test_host import lay_out
from workbench.hosts.emulated.quota import CpuController
from workbench.store.errors import HostsError


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """Version 1, as it is in a container: its own group is the uppermost that it sees."""
    return lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "3:memory:/\n2:cpu,cpuacct:/docker/1\n0::/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/unified/cgroup.controllers": "\n",
        },
    )


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    return lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/session\n",
            "sys/fs/cgroup/cgroup.controllers": "cpuset cpu memory\n",
            "sys/fs/cgroup/cgroup.subtree_control": "memory\n",
        },
    )


def test_version_1_is_found_where_it_is_seen(older):
    assert CpuController.find(older) == CpuController(older / "sys/fs/cgroup/cpu", 1)


def test_version_2_has_groups_at_the_top(newer):
    assert CpuController.find(newer) == CpuController(newer / "sys/fs/cgroup", 2)


def test_without_the_controller_there_are_no_emulated_hosts(tmp_path):
    with pytest.raises(HostsError, match="need control groups with the cpu controller"):
        CpuController.find(tmp_path)


@pytest.mark.parametrize(
    ("cpus", "quota", "period"),
    [(0.25, "5000", "20000"), (2.0, "40000", "20000"), (0.01, "1000", "100000")],
)
def test_a_quota_is_a_part_of_each_period(older, cpus, quota, period):
    controller = CpuController.find(older)
    join = controller.make("wb7-0", 1, cpus)
    assert join == controller.folder / "workbench-wb7-0-host1" / "cgroup.procs"
    assert (join.parent / "cpu.cfs_quota_us").read_text() == quota
    assert (join.parent / "cpu.cfs_period_us").read_text() == period


def test_version_2_is_asked_for_the_controller_first(newer):
    controller = CpuController.find(newer)
    join = controller.make("wb7-0", 0, 0.5)
    assert (join.parent / "cpu.max").read_text() == "10000 20000"
    assert (controller.folder / "cgroup.subtree_control").read_text() == "+cpu"


@pytest.mark.parametrize("kind", ["older", "newer"])
def test_full_speed_is_no_quota(kind, request):
    join = CpuController.find(request.getfixturevalue(kind)).make("wb7-0", 0, None)
    assert list(join.parent.iterdir()) == []


def test_what_the_kernel_refuses_is_told(older):
    controller = CpuController.find(older)
    controller.make("wb7-0", 0, None)
    with pytest.raises(HostsError, match=r"no control group could limit host 0: .*exists"):
        controller.make("wb7-0", 0, None)
