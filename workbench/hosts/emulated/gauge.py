"""What a host measures of itself when `measuring.py` runs this file on it.

`gauge.py MODE SECONDS` says "ready" and what others have to know, waits for a line, and says at
last what it found:

    compute    ready                  processor seconds that it got in a second
    receive    ready <port>           bits per second that reached it
    send       ready                  nothing; the line is "<address> <port>"

No import but Python's own, so that it starts quickly on a slow host too.
"""

import socket
import sys
import time
from contextlib import suppress

CHUNK = 1 << 18
ARRIVE_WITHIN_S = 10.0


def begin(*told: object) -> str:
    """Says that it is ready; returns the line that starts it."""
    print("ready", *told, flush=True)
    return sys.stdin.readline()


def compute(seconds: float) -> float:
    """Returns the share of a processor that a loop without end gets."""
    begin()
    began, used = time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - began) < seconds:
        pass
    return (time.process_time() - used) / passed


def receive(seconds: float) -> float:
    """Bits per second of one connection, its first tenth aside: a link's bucket starts full."""
    buffer, num_bytes = bytearray(CHUNK), 0
    with socket.create_server(("", 0)) as server:
        server.settimeout(ARRIVE_WITHIN_S)
        begin(server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            connection.settimeout(ARRIVE_WITHIN_S)
            connection.recv_into(buffer)
            first = time.perf_counter()
            began = end = first
            while end - first < seconds:
                arrived = connection.recv_into(buffer)
                end = time.perf_counter()
                if end - first < seconds / 10:
                    began = end
                else:
                    num_bytes += arrived
            return num_bytes / (end - began)


def send(seconds: float) -> float:
    """Sends until nobody listens any more."""
    address, port = begin().split()
    zeros = bytes(CHUNK)
    with suppress(OSError), socket.create_connection((address, int(port))) as connection:
        connection.settimeout(seconds + ARRIVE_WITHIN_S)
        while True:
            connection.sendall(zeros)
    return 0.0


if __name__ == "__main__":
    mode = {"compute": compute, "receive": receive, "send": send}[sys.argv[1]]
    print(mode(float(sys.argv[2])), flush=True)
