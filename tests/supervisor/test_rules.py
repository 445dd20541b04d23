"""What a supervisor goes by: its spec, how long it stays, how often it tries."""

import json
import os
from dataclasses import replace

import pytest

from tests.supervisor import supervising
from workbench.hosts.processes import ending
from workbench.store.cluster_spec import FILE, HERE, ClusterSpec, Site, identity
from workbench.store.cluster_store import STORE
from workbench.store.errors import ClusterError
from workbench.store.process import ProcessIdentity
from workbench.store.record import Request
from workbench.store.store import Store
from workbench.supervisor.kept_process import Backoff, RestartPolicy
from workbench.supervisor.supervisor import Lifetime

GONE = replace(ProcessIdentity.here(), started=ProcessIdentity.here().started - 1)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / STORE, create=True)


def test_a_spec_is_read_as_it_was_written(tmp_path):
    there = Site(("nsenter", "--net=/run/netns/host0", "--"), {"GLOO_SOCKET_IFNAME": "eth0"})
    spec = supervising.spec(
        1, linger_s=2.5, bound_to=ProcessIdentity.here(), environment={"A": "b"}
    )
    spec = replace(spec, sites=(there, HERE))
    spec.save(tmp_path)
    assert ClusterSpec.load(tmp_path) == spec
    assert spec.num_engines == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "is no cluster's folder"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"version": 0}', "has version 0, and this workbench reads version 2"),
    ],
)
def test_a_spec_that_cannot_be_read(tmp_path, text, told):
    if text is not None:
        (tmp_path / FILE).write_text(text)
    with pytest.raises(ClusterError, match=told):
        ClusterSpec.load(tmp_path)


def test_a_spec_with_parts_missing_cannot_be_read(tmp_path):
    supervising.spec(1).save(tmp_path)
    fields = json.loads((tmp_path / FILE).read_text())
    del fields["devices"][0]["cores"]
    (tmp_path / FILE).write_text(json.dumps(fields))
    with pytest.raises(ClusterError, match=r"cluster.json cannot be read: 'cores'"):
        ClusterSpec.load(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [{"linger_s": -1}, {"timeout_s": 0}, {"lease_s": 0}, {"suspicion_s": -1}, {"sites": (HERE,)}],
)
def test_impossible_specs(wrong):
    with pytest.raises(ValueError, match=r"linger_s|timeout|lease|suspicion|2 devices and 1 sites"):
        replace(supervising.spec(1), **wrong)


def test_clusters_of_one_name_in_two_places_are_two(tmp_path):
    assert identity(tmp_path / "a" / ".cluster-mine") != identity(tmp_path / "b" / ".cluster-mine")
    assert identity(tmp_path / ".cluster-mine").startswith(".cluster-mine-")


def test_a_cluster_stays_while_somebody_is_attached_and_a_while_more(store):
    store.attach(ProcessIdentity.here())
    lifetime = Lifetime(supervising.spec(1, linger_s=5.0), store, 0.0)
    assert not lifetime.is_over(1000.0)
    store.detach(ProcessIdentity.here())
    assert not lifetime.is_over(1005.0)
    assert "nobody was attached" in lifetime.is_over(1005.1)


def test_who_ended_without_a_word_is_not_attached(store):
    store.attach(GONE)
    assert Lifetime(supervising.spec(1, linger_s=5.0), store, 0.0).is_over(5.1)
    assert store.owners() == ()


@pytest.mark.parametrize(
    ("state", "stays"),
    [("queued", True), ("stopping", True), ("paused", False), ("failed", False)],
)
def test_a_cluster_stays_for_jobs_that_go_on_by_themselves(store, state, stays):
    job = store.submit(Request(kind="train", name="mlp", task="a:b", engines=1))
    store.update(job, state=state)
    lifetime = Lifetime(supervising.spec(1, linger_s=0.0), store, 0.0)
    assert bool(lifetime.is_over(1.0)) == (not stays)


def test_a_cluster_that_is_bound_ends_with_its_process_whatever_it_has_to_do(store):
    store.attach(ProcessIdentity.here())
    lifetime = Lifetime(supervising.spec(1, bound_to=GONE), store, 0.0)
    assert f"process {os.getpid()} has ended" in lifetime.is_over(0.1)
    assert not Lifetime(supervising.spec(1, bound_to=ProcessIdentity.here()), store, 0.0).is_over(
        0.1
    )


def test_the_first_replacement_starts_at_once_and_the_next_ones_later():
    series = Backoff(RestartPolicy(lasting_s=10.0, first_s=0.5, longest_s=1.5, most=5))
    assert not series.has_begun
    waits = []
    for _ in range(5):
        series.began(100.0)
        due = series.ended(101.0)
        waits.append(None if due is None else due - 101.0)
    assert waits == [0.0, 0.5, 1.0, 1.5, None]


def test_one_that_had_started_may_end_soon_and_often():
    series = Backoff(RestartPolicy(lasting_s=10.0, first_s=0.5, longest_s=1.5, most=2))
    for began in (0.0, 1.0, 2.0):
        series.began(began)
        assert series.ended(began + 0.5, had_started=True) == began + 0.5


def test_one_that_lasted_begins_anew():
    series = Backoff(RestartPolicy(lasting_s=10.0, first_s=0.5, longest_s=1.5, most=2))
    for began in (0.0, 100.0, 200.0):
        series.began(began)
        assert series.ended(began + 10.0) == began + 10.0


@pytest.mark.parametrize(
    ("code", "words"), [(None, "ended"), (-9, "was ended by SIGKILL"), (3, "exited with 3")]
)
def test_how_a_process_ended(code, words):
    assert ending(code) == words
