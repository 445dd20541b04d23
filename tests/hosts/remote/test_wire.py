"""What is said between hosts arrives as it was said, or not at all."""

import socket
import threading
from multiprocessing.connection import Connection

import pytest

from workbench.hosts.remote.wire import Wire

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


def heard(wire: Wire, count: int) -> None:
    for _ in range(count):
        wire.hear(10.0)
