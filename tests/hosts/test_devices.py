"""Who gets which cores and GPUs, from hosts that are made up."""

import pytest

from workbench.hosts.host import Gpu, Host, assign, divide, whole_host

FOUR = Host("here", ((0,), (1,), (2,), (3,)), memory_bytes=8 << 30)
TWO_WAY = Host("here", ((0, 4), (1, 5), (2, 6), (3, 7)))
GPUS = (Gpu("GPU-a", "H100", 80 << 30), Gpu("GPU-b", "H100", 80 << 30))


@pytest.mark.parametrize(
    ("host", "num_engines", "cores", "threads"),
    [
        (FOUR, 1, [(0, 1, 2, 3)], [4]),
        (FOUR, 2, [(0, 1), (2, 3)], [2, 2]),
        (FOUR, 3, [(0, 1), (2,), (3,)], [2, 1, 1]),
        (FOUR, 4, [(0,), (1,), (2,), (3,)], [1, 1, 1, 1]),
        (TWO_WAY, 2, [(0, 4, 1, 5), (2, 6, 3, 7)], [2, 2]),  # a core's two halves stay together
        (TWO_WAY, 4, [(0, 4), (1, 5), (2, 6), (3, 7)], [1, 1, 1, 1]),
    ],
)
def test_cores_are_handed_out_whole_and_disjoint(host, num_engines, cores, threads):
    devices = assign(num_engines, host)
    assert [device.cores for device in devices] == cores
    assert [device.threads for device in devices] == threads
    assert {device.sharers for device in devices} == {1}


def test_more_engines_than_cores_share_them_and_say_so():
    devices = assign(6, FOUR)
    assert [device.cores for device in devices] == [(0,), (1,), (2,), (3,), (0,), (1,)]
    assert [device.sharers for device in devices] == [2, 2, 1, 1, 2, 2]
    assert str(devices[0]) == "core 0, shared by 2 engines"
    assert str(devices[2]) == "core 2"


def test_under_a_quota_engines_are_not_pinned():
    host = Host("here", FOUR.cores, quota=2.5)
    devices = assign(2, host)
    assert [device.cores for device in devices] == [(0, 1, 2, 3)] * 2
    assert [device.threads for device in devices] == [1, 1]
    assert whole_host(host).threads == 2


def test_a_quota_that_grants_all_cores_changes_nothing():
    assert assign(4, Host("here", FOUR.cores, quota=4.0)) == assign(4, Host("here", FOUR.cores))


def test_each_engine_gets_a_gpu_and_its_own_cores():
    one, other = assign(2, Host("here", FOUR.cores, gpus=GPUS))
    assert (one.kind, one.gpu, one.cores, one.memory_bytes) == ("cuda", "GPU-a", (0, 1), 80 << 30)
    assert (other.gpu, other.cores) == ("GPU-b", (2, 3))


def test_more_engines_than_gpus_share_them_and_say_so():
    devices = assign(3, Host("here", FOUR.cores, gpus=GPUS))
    assert [device.gpu for device in devices] == ["GPU-a", "GPU-b", "GPU-a"]
    assert [device.sharers for device in devices] == [2, 1, 2]
    assert str(devices[0]) == "H100, shared by 2 engines"
    assert str(devices[1]) == "H100"


def test_the_assistant_has_all_cores_and_no_gpu():
    device = whole_host(Host("here", TWO_WAY.cores, gpus=GPUS))
    assert (device.kind, device.gpu, device.threads) == ("cpu", "", 4)
    assert device.cores == (0, 1, 2, 3, 4, 5, 6, 7)


def test_a_host_is_divided_into_hosts_with_cores_of_their_own():
    one, other = divide(Host("here", TWO_WAY.cores, memory_bytes=8 << 30, gpus=GPUS), ("a", "b"))
    assert one == Host("a", ((0, 4), (1, 5)), memory_bytes=8 << 30)
    assert other == Host("b", ((2, 6), (3, 7)), memory_bytes=8 << 30)
    assert [part.cores for part in divide(FOUR, "abc")] == [((0,), (1,)), ((2,),), ((3,),)]


def test_more_hosts_than_cores_share_them():
    assert [part.cores for part in divide(FOUR, "abcdef")] == [
        ((core,),) for core in (0, 1, 2, 3, 0, 1)
    ]


def test_a_container_s_quota_is_divided_and_its_cores_are_not():
    assert divide(Host("here", FOUR.cores, quota=3.0), "ab") == (
        Host("a", FOUR.cores, quota=1.5),
        Host("b", FOUR.cores, quota=1.5),
    )


def test_no_engines_is_an_error():
    with pytest.raises(ValueError, match="at least one engine, got 0"):
        assign(0, FOUR)
