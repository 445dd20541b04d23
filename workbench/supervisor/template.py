"""A process that others are forked from: it has imported once what each of them needs.

To import torch takes seconds of a core, and engines start together, on hosts that mostly have fewer
cores than a cluster has processes. A fork takes milliseconds, and shares the imported pages. Most
of what is forked is engines; the store where ranks meet is torch's, so it is another.

    supervisor ── socket ── template ── fork ── go-between ── fork ── engine
        └───────────────────────────────────────────────────────────────┘ its parent, at last

The go-between ends at once. The engine it leaves is then a child of the supervisor, which has asked
the kernel for that: who waits for it, signals it or ends with it sees no difference to one that
the supervisor has started itself. The other side of this is in `spawn.py`.
"""

import asyncio
import ctypes
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

TEMPLATE = "WORKBENCH_TEMPLATE"
"""The variable that names a template's end of the socket."""
READY = b"ready\n"
HEAD = 3
"""What a command line under `spawn.py` begins with: the interpreter, `-P`, the file."""
# What a process reads after its imports: each has its own, or none.
OWN = frozenset({"WORKBENCH_ENGINE", "WORKBENCH_CORES", "WORKBENCH_GROUP", "WORKBENCH_CONNECT"})
_PR_SET_CHILD_SUBREAPER = 36
_WITHIN_S = 30.0  # a fork, on a host that may be busy


class EngineTemplate:
    """A template, as its supervisor sees it; to be used where an event loop runs.

    Args:
        on_ready: is called when it can fork, or it has turned out that it never can.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], on_ready: Callable[[], None]
    ) -> None:
        self._head, self._environment = list(command[:HEAD]), dict(environment)
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command,
                env={**environment, TEMPLATE: str(theirs.fileno())},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._socket.settimeout(_WITHIN_S)
        self._on_ready = on_ready
        self.is_waited_for, self._works = True, False
        asyncio.get_running_loop().add_reader(self._socket, self._told)

    @property
    def shared_environment(self) -> dict[str, str]:
        """What all that is forked from it have in common."""
        return {name: value for name, value in self._environment.items() if name not in OWN}

    def takes(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether a process with these can be forked from it."""
        enter, head, _ = self._parted(command)
        different = dict(environment.items() ^ self._environment.items()).keys()
        same = head == self._head and different <= OWN and network_of(enter) is not None
        return self._works and same

    def fork(self, command: Sequence[str], environment: Mapping[str, str], output: str) -> int:
        """Forks a process; returns its id.

        Raises:
            OSError: it could not be forked.
        """
        enter, _, arguments = self._parted(command)
        own = {"environment": dict(environment), "arguments": arguments}
        asked = json.dumps({**own, "output": output, "network": network_of(enter)}).encode()
        try:
            with _adopting():
                self._socket.sendall(asked + b"\n")
                pid = int(self._socket.recv(64))
        except (OSError, ValueError) as error:
            self.close()
            raise OSError(f"no process could be forked: {error}") from error
        if pid == 0:
            raise OSError("no process could be forked: there was no room for one more")
        return pid

    def close(self) -> None:
        """Ends the template; what was forked from it goes on."""
        self._works = False
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _parted(self, command: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
        """What leads to the place of a process, what runs a module there, and what is run."""
        begins = command.index(self._head[0]) if self._head[0] in command else 0
        runs = begins + HEAD
        return list(command[:begins]), list(command[begins:runs]), list(command[runs:])

    def _told(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self.is_waited_for = False  # whatever it tells
        self._on_ready()
        self._works = self._socket.recv(len(READY)) == READY


@contextmanager
def _adopting() -> Iterator[None]:
    """Lets what descendants leave behind become children of this process."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


def network_of(enter: Sequence[str]) -> str | None:
    """The file of the network namespace that a command line enters, of what it begins with.

    "" where it stays in that of its parent, None where it leads to elsewhere.
    """
    match enter:
        case []:
            return ""
        case ["nsenter", option, "--"] if option.startswith("--net="):
            return option.removeprefix("--net=")
        case _:
            return None


def can_fork() -> bool:
    """Whether this system has what a template needs."""
    return sys.platform == "linux"
