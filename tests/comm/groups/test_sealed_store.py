"""Notes that only the ranks of a world can have written."""

import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from workbench.comm.groups.world import RankConfig, SealedStore, World
from workbench.comm.messages.errors import CommError

REFUSED = "was written by somebody who is no rank of this world"


@pytest.fixture
def raw():
    return dist.HashStore()


@pytest.fixture
def sealed(raw):
    return SealedStore(raw, "secret")


@pytest.mark.parametrize("value", ["10.0.0.1:29500", b"\x00\xff address \n", "", "ä"])
def test_what_was_left_is_found(raw, sealed, value):
    sealed.set("a", value)
    expected = value.encode() if isinstance(value, str) else value
    assert sealed.get("a") == SealedStore(raw, "secret").get("a") == expected
    assert PrefixStore("p", sealed).check(["a"]) is False
    PrefixStore("p", sealed).set("a", "theirs")
    assert PrefixStore("p", sealed).get("a") == b"theirs"
    assert sealed.get("a") == expected


@pytest.mark.parametrize("forged", [b"10.0.0.9:1", b"", b"0" * 64 + b"10.0.0.9:1"])
def test_a_note_without_the_mac_is_refused(raw, sealed, forged):
    raw.set("a", forged)
    with pytest.raises(CommError, match=f"the note 'a', by which .*{REFUSED}"):
        sealed.get("a")


def test_a_note_of_another_world_or_another_place_is_refused(raw, sealed):
    SealedStore(raw, "another").set("a", "x")
    with pytest.raises(CommError, match=REFUSED):
        sealed.get("a")
    sealed.set("b", "x")
    raw.set("a", raw.get("b"))
    with pytest.raises(CommError, match=REFUSED):
        sealed.get("a")
    raw.set("b", raw.get("b")[:-1] + b"y")
    with pytest.raises(CommError, match=REFUSED):
        sealed.get("b")


def test_of_several_who_leave_a_note_the_first_counts(raw, sealed):
    assert sealed.compare_set("a", "", "first") == b"first"
    assert SealedStore(raw, "secret").compare_set("a", "", "second") == b"first"
    assert sealed.get("a") == b"first"
    with pytest.raises(ValueError, match="not after 'first'"):
        sealed.compare_set("a", "first", "third")
    with pytest.raises(CommError, match=REFUSED):
        SealedStore(raw, "another").compare_set("a", "", "fourth")


def test_the_rest_is_the_stores(raw, sealed):
    assert sealed.add("n", 2) == 2
    assert sealed.add("n", 3) == 5
    sealed.set("a", "x")
    assert sealed.num_keys() == raw.num_keys() == 2
    assert sealed.check(["a", "n"])
    assert not sealed.check(["a", "b"])
    sealed.wait(["a"])
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        sealed.wait(["b"], timedelta(milliseconds=10))
    sealed.set_timeout(timedelta(milliseconds=20))
    assert sealed.timeout == raw.timeout == timedelta(milliseconds=20)
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        sealed.get("b")
    assert sealed.delete_key("a")
    assert not sealed.check(["a"])


def test_a_world_does_not_open_on_a_forged_note():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    PrefixStore("a world", store).set("the world to open/1", "cpu")
    threads = torch.get_num_threads()
    config = RankConfig(
        0, 2, "127.0.0.1", store.port, "a world", timeout_s=20.0, threads=threads, secret="s"
    )
    with pytest.raises(CommError, match=f"the world to open/1.*{REFUSED}"), World.open(config):
        pass
    assert "secret" not in repr(config)


def test_no_address_lies_there_in_the_open(monkeypatch):
    """All that gloo leaves for other ranks goes through the seal."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    raw, left = PrefixStore("a world", store), []
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")

    class Kept(SealedStore):
        def set(self, key, value):
            left.append(key)
            super().set(key, value)

    def join(rank: int) -> None:
        own = dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=20))
        sealed = Kept(PrefixStore("a world", own), "s")
        groups.append(dist.ProcessGroupGloo(sealed, rank, 2, timedelta(seconds=20)))

    groups = []  # one that went while the other still connects would break its connection
    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(left) >= 2
    assert raw.num_keys() >= len(left)
    for key in left:
        SealedStore(raw, "s").get(key)
