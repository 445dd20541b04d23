"""Which profile, and what a supervisor is told of it."""

import socket

import pytest
from traitlets.config import Config

from tests.hosts.remote.agents import hello
from workbench.client.cluster import Cluster
from workbench.hosts.emulated.hosts import Hosts
from workbench.hosts.remote.gathering import AllocationLimit, devices_of, free_ports, log_in_once
from workbench.store.cluster_spec import ClusterSpec, Profile
from workbench.store.errors import ClusterError
from workbench.store.record import Request
from workbench.store.store import Store
from workbench.supervisor.cluster_processes import ports_in

TRAINS = Request(kind="train", name="net", task="a:b", packed=b"", keywords=b"", engines=1, steps=9)


@pytest.fixture
def profile(tmp_path, monkeypatch):
    """A profile's folder, as IPython has it."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    folder = tmp_path / "profile_slurm"
    folder.mkdir()
    (folder / "ipcluster_config.py").write_text("c = get_config()\n")
    return folder


def test_a_profile_is_found_by_name_and_by_folder(profile):
    assert Profile("slurm").folder() == Profile(str(profile)).folder() == profile
    missing = r"no profile 'mpi': .*profile_mpi/ipcluster_config.py is not there.*launcher_class"
    with pytest.raises(ClusterError, match=missing):
        Cluster(2, profile="mpi")


def test_a_spec_is_read_as_it_was_written_before_and_after_its_hosts_have_come(
    tmp_path, profile, monkeypatch
):
    monkeypatch.setenv("HF_HOME", "/models")
    slurm = Profile("slurm", interface="ib0", ports=(40000, 40100), environment=("HF_HOME",))
    spec = ClusterSpec(launch=slurm.launch(1))
    assert spec.launch.environment == {"HF_HOME": "/models"}
    spec.save(tmp_path)
    assert ClusterSpec.load(tmp_path) == spec
    assert (tmp_path / "cluster.json").stat().st_mode & 0o777 == 0o600
    assert spec.num_engines == 1
    with pytest.raises(ValueError, match="a device and a site for each"):
        ClusterSpec(launch=spec.launch, devices=devices_of([hello("a")]))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"name": ""}, "a profile has a name"),
        ({"ports": (40000, 40010)}, "32 or more from 1024 to 65535, got"),
        ({"ports": (1, 100)}, "32 or more from 1024"),
        ({"environment": "HF_HOME"}, "names of variables, got 'HF_HOME'"),
        ({"environment": ("A=b",)}, "names of variables"),
        ({"notice_s": 0}, "notice_s is a positive number of seconds, got 0"),
        ({"start_within_s": float("nan")}, "start_within_s is a positive number"),
    ],
)
def test_a_profile_that_cannot_be(options, told):
    with pytest.raises(ValueError, match=told):
        Profile(**{"name": "slurm", **options})


def test_a_cluster_is_on_emulated_hosts_or_on_a_profiles(profile):
    with pytest.raises(ValueError, match="not both"):
        Cluster(2, hosts=Hosts(2), profile="slurm")


def test_a_variable_without_a_value_is_named(profile, monkeypatch):
    monkeypatch.delenv("HF_HOME", raising=False)
    with pytest.raises(ClusterError, match="engines are to get HF_HOME, which has no value here"):
        Profile("slurm", environment=("HF_HOME",)).launch(2)


def test_ports_that_others_have_are_left_alone(profile):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        first = min(port, 65535 - 40)
        slurm = Profile("slurm", address="127.0.0.1", ports=(first, first + 40)).launch(2)
        assert port not in free_ports(slurm)
    assert free_ports(Profile("slurm").launch(2)) is None


def test_before_the_hosts_are_taken_away_what_trains_is_paused_once(tmp_path):
    store = Store(tmp_path / "server.sqlite", create=True)
    limit = AllocationLimit(store, ends_at=1000.0, notice_s=60.0)
    limit.announce()
    job = store.submit(TRAINS)
    limit.look(939.0)
    assert not store.commands()
    for now in (941.0, 942.0):
        limit.look(now)
    (command,) = store.commands()
    assert (command.kind, command.job) == ("pause", job)
    early, late = [event.text for event in store.events() if event.kind == "limit"]
    assert "runs are paused 60 s before that" in early
    assert "cluster.restart() asks for hosts again" in late
    AllocationLimit(store, ends_at=None, notice_s=60.0).look(1e12)  # there is none
    assert len(store.commands()) == 1


def test_a_host_is_logged_into_once_for_all_its_engines():
    config = Config()
    config.SSHEngineSetLauncher.engines = {"a": 2, "me@b": {"n": 4, "ssh_cmd": ["x"]}, "c": 9}
    log_in_once(config, 5)
    assert config.SSHEngineSetLauncher.engines == {
        "a": {"n": 1, "engine_args": ["2"]},
        "me@b": {"n": 1, "engine_args": ["3"], "ssh_cmd": ["x"]},
    }
    few = Config()
    few.SSHEngineSetLauncher.engines = {"a": 2, "b": 1}
    with pytest.raises(ClusterError, match="have 3 engines in all, not 4"):
        log_in_once(few, 4)
    other = Config()  # of another launcher
    log_in_once(other, 4)
    assert "engines" not in other.SSHEngineSetLauncher


def test_the_ports_that_a_controller_has_written_down_are_not_given_to_the_next_one(tmp_path):
    written = tmp_path / "engine.json"
    written.write_text('{"registration": 41002, "broadcast": [41003, 41004], "ssh": ""}')
    assert {41002, 41003, 41004} <= ports_in([written, tmp_path / "client.json"])
