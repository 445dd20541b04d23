"""Ports for servers that cannot say which one the system gave them."""

import random
import socket
from contextlib import ExitStack

# Below those that the system gives to whoever asks for any: what runs beside the tests does so
# all the time, also between the look at a port and its use.
GIVEN_BY_NAME = range(20_000, 32_000)


def free(count: int) -> list[int]:
    """Ports of this machine that nobody has now, and that nobody gets by chance."""
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            port = random.SystemRandom().choice(GIVEN_BY_NAME)
            try:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:  # somebody has it
                continue
            found.append(port)
    return found
