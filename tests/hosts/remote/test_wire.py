"""What is said between hosts arrives as it was said, or not at all."""

import os
import queue
import resource
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

from workbench.hosts.remote import wire
from workbench.hosts.remote.wire import Wire, introduced, welcome

KEY = b"k" * 32


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def connected(tamper):
    """Two ends that know the key, and somebody between them who changes what the first says."""
    (a, left), (right, b) = pair(), pair()
    near, far = Connection(left.detach()), Connection(right.detach())

    def pass_on(source, target, change):
        try:
            while True:
                for message in change(source.recv_bytes()):
                    target.send_bytes(message)
        except (EOFError, OSError):
            target.close()

    proved = threading.Event()
    for source, target, change in (
        (near, far, lambda message: tamper(message) if proved.is_set() else [message]),
        (far, near, lambda message: [message]),
    ):
        threading.Thread(target=pass_on, args=(source, target, change), daemon=True).start()
    first, second = Wire(a), Wire(b)
    other = threading.Thread(target=second.prove, args=(KEY,), kwargs={"first": False})
    other.start()
    first.prove(KEY, first=True)
    other.join()
    proved.set()
    return first, second


def test_what_is_said_is_heard_in_both_directions():
    first, second = connected(lambda message: [message])
    for number in range(3):
        first.say(number=number)
        assert second.hear(10.0) == {"number": number}
        second.say(number=-number)
        assert first.hear(10.0) == {"number": -number}


@pytest.mark.parametrize(
    "tamper",
    [
        pytest.param(lambda m: [m.replace(b"true", b"null")], id="changed"),
        pytest.param(lambda m: [m, m], id="said-twice"),
        pytest.param(lambda m: [] if b'"number": 1' in m else [m], id="left-out"),
        pytest.param(lambda m: [b'{"signal": 9}'], id="somebody-else-s"),
        pytest.param(lambda m: [m[:20]], id="cut"),
    ],
)
def test_what_somebody_between_them_does_is_noticed(tamper):
    first, second = connected(tamper)
    for number in range(3):
        first.say(number=number, leave=True)
    with pytest.raises(OSError, match="changed, or is not from the other end"):
        heard(second, 3)


def test_what_is_nested_too_deeply_is_no_message():
    a, b = pair()
    Connection(b.detach()).send_bytes(b"[" * wire.LARGEST_OF_STRANGERS)
    with pytest.raises(OSError, match="recursion"):
        Wire(a).hear(10.0)


def test_a_connection_is_ended_without_an_error_where_no_file_can_be_opened():
    a, b = pair()
    link = Wire(a)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        link.end()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        b.close()


def heard(link: Wire, count: int) -> None:
    for _ in range(count):
        link.hear(10.0)


@pytest.fixture
def door(monkeypatch):
    """Where connections are welcome; `door.known` has those that knew the key."""
    monkeypatch.setattr(wire, "PATIENCE_S", 2)
    door = SimpleNamespace(known=queue.SimpleQueue(), before=threading.active_count())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        given = listener, partial(Wire.prove, key=KEY, first=False), door.known.put
        welcoming = threading.Thread(target=welcome, args=given)
        welcoming.start()
        door.place = listener.getsockname()
        yield door
    welcoming.join(10.0)
    assert not welcoming.is_alive()


def introduces_itself(door) -> Wire:
    return introduced(lambda: Wire.to(*door.place, 5.0), partial(Wire.prove, key=KEY, first=True))


def is_ended(link: socket.socket, within_s: float) -> bool:
    """Whether the other end closes a connection in time; what it says before is left out."""
    link.settimeout(within_s)
    try:
        while link.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def test_who_knows_the_key_comes_in_while_strangers_hold_all_places(door):
    strangers = [socket.create_connection(door.place) for _ in range(wire.MOST_STRANGERS + 8)]
    assert introduces_itself(door)
    assert door.known.get(timeout=5.0)
    assert is_ended(strangers[0], 1.0)  # less than it would have
    for each in strangers:
        each.close()


def test_strangers_have_few_threads(door):
    strangers = [socket.create_connection(door.place) for _ in range(3 * wire.MOST_STRANGERS)]
    assert all(is_ended(each, 1.0) for each in strangers[: 2 * wire.MOST_STRANGERS])
    assert threading.active_count() - door.before <= wire.MOST_STRANGERS + 2
    for each in strangers:
        each.close()


def test_who_says_one_byte_after_another_has_no_longer(door):
    with socket.create_connection(door.place) as stranger:
        dripping, began = threading.Event(), time.monotonic()
        stranger.sendall(b"\0\0\0\xff")  # bytes that are to come

        def drip() -> None:
            with suppress(OSError):
                while not dripping.wait(0.2):
                    stranger.sendall(b"\0")

        thread = threading.Thread(target=drip)
        thread.start()
        assert is_ended(stranger, 8.0)
        assert time.monotonic() - began < 5.0
        dripping.set()
        thread.join()


def test_a_stranger_says_little():
    near, far = pair()
    with near:
        link = Wire(far)
        Connection(os.dup(near.fileno())).send_bytes(b" " * (wire.LARGEST_OF_STRANGERS + 1))
        with pytest.raises(OSError, match="bad message length"):
            link.hear(5.0)


def test_who_knows_the_key_is_waited_for_no_more(door):
    link = introduces_itself(door)
    other = door.known.get(timeout=5.0)
    assert other.hear(3.0) is None  # longer than a stranger has
    link.say(number=1)
    assert other.hear(5.0) == {"number": 1}


def test_who_had_to_make_room_tries_again(monkeypatch):
    monkeypatch.setattr(wire, "TRY_AGAIN_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = listener.getsockname()

        def answer() -> None:
            for _ in range(2):
                listener.accept()[0].close()
            Wire(listener.accept()[0]).prove(KEY, first=False)

        threading.Thread(target=answer, daemon=True).start()
        assert introduced(lambda: Wire.to(*place, 5.0), partial(Wire.prove, key=KEY, first=True))


def test_who_does_not_know_the_key_is_told_so_in_the_end(door, monkeypatch):
    monkeypatch.setattr(wire, "TRY_AGAIN_S", 0.0)
    with pytest.raises(OSError, match="does not know the cluster's key"):
        introduced(
            lambda: Wire.to(*door.place, 5.0), partial(Wire.prove, key=b"x" * 32, first=True)
        )
    assert door.known.empty()
