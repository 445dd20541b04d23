"""One engine's host: `python -m workbench.hosts.remote.agent FOLDER NONCE PLACE,... IFACE`.

Started by a launcher, it registers with the supervisor, and then has one engine at a time, for as
long as a relay asks for it (see the folder's own text). It imports no torch, so that it answers
when the engine is busy.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from workbench.hosts.remote.reception import Hello, address_of, addresses
from workbench.hosts.remote.wire import ANY, KEY, Wire, introduced, welcome
from workbench.store.cluster_spec import ClusterSpec
from workbench.store.errors import ClusterError

MODULE = "workbench.hosts.remote.agent"
DIAL_S = 5.0
SEEN_WITHIN_S = 15.0  # a folder that is new may not be seen at once through a network
SAY_WITHIN_S = 6.0  # what to start; then a relay says something every quarter of a second
LAST_WORDS = 2000  # characters


def main(arguments: Sequence[str]) -> None:
    """Serves until the supervisor is gone.

    Raises:
        SystemExit: the supervisor cannot be reached, or the cluster's folder is not to be seen; the
            text says which. Of what launchers add, a number is how many agents there shall be.
    """
    folder, nonce, places, interface, *others = arguments
    for _ in range(1, next((int(each) for each in others if each.isdecimal()), 1)):
        alike = ["-P", "-m", MODULE, folder, nonce, places, interface]
        subprocess.Popen([sys.executable, *alike], stdin=subprocess.DEVNULL)
    key, host, complaint = _key(Path(folder)), socket.gethostname(), ""
    try:
        own = None if interface == ANY else address_of(interface)
        variables = _variables(Path(folder)) if key else {}
    except (ValueError, ClusterError) as error:
        complaint = f"{host}: {error}"
    if key is None:
        complaint = (
            f"{host} does not see {folder}: Cluster(directory=...) has to be on a file system that "
            "all hosts share, by the same path"
        )

    def greet(supervisor: Wire) -> None:
        supervisor.say(nonce=nonce, complaint=complaint)
        if key and not complaint:
            supervisor.prove(key, first=True)

    supervisor = introduced(lambda: _dial(places.split(",")), greet)
    if complaint or key is None:
        raise SystemExit(complaint)
    address = own or supervisor.here
    listener = socket.create_server((address, 0))
    name = addresses().get(address, "") if interface == ANY else interface
    supervisor.say(**Hello.here(address, listener.getsockname()[1], name).plain())
    serving = Serving(variables)
    threading.Thread(target=_follow, args=(supervisor, serving), daemon=True).start()
    admitted: SimpleQueue[Wire] = SimpleQueue()
    receiving = (listener, partial(Wire.prove, key=key, first=False), admitted.put)
    threading.Thread(target=welcome, args=receiving, daemon=True).start()
    while True:
        with suppress(OSError):  # whoever it was has gone
            serving.serve(admitted.get())


def _dial(places: Sequence[str]) -> Wire:
    """Connects to the supervisor, at whichever of its addresses it can be reached."""
    tried = []
    for place in places:
        address, _, port = place.rpartition(":")
        try:
            return Wire.to(address, int(port), DIAL_S)
        except OSError as error:
            tried.append(f"{place} ({error})")
    raise SystemExit(
        f"{socket.gethostname()} cannot reach the host that starts the cluster at "
        f"{', '.join(tried)}: Profile(address=..., ports=...) say where it listens"
    )


def _key(folder: Path) -> bytes | None:
    deadline = time.monotonic() + SEEN_WITHIN_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            if key := (folder / KEY).read_bytes():
                return key
        time.sleep(0.1)
    return None


def _variables(folder: Path) -> Mapping[str, str]:
    """The variables of all engines, which may be secrets: read here, not said over a network."""
    launch = ClusterSpec.load(folder).launch
    return {} if launch is None else launch.environment


def _follow(supervisor: Wire, serving: "Serving") -> None:
    """Ends this process when the supervisor has gone, or sends it away."""
    with suppress(OSError):
        while (said := supervisor.hear()) is not None and "leave" not in said:
            pass
    serving.kill()
    os._exit(0)


class Serving:
    """One engine after another, each for one relay."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._process: subprocess.Popen[bytes] | None = None

    def serve(self, relay: Wire) -> None:
        """Starts an engine, does to it what the relay says, and returns when both have ended.

        Raises:
            OSError: the relay has gone before it said what to start.
        """
        told = relay.hear(SAY_WITHIN_S)
        if told is None:
            return
        log = Path(told["log"])
        environment = {**self._variables, **told["environment"]}
        self._process = process = _start(told["options"], environment, log)
        watch = threading.Thread(target=_tell_end, args=(process, relay, log), daemon=True)
        watch.start()
        try:
            # The relay's silence is a host or a way that was lost: it has counted the engine as
            # dead long since.
            while (said := relay.hear_awake(2 * told["lease_s"])) is not None:
                if "signal" in said and process.poll() is None:
                    process.send_signal(said["signal"])
                relay.say(stat=_stat(process.pid))
        except OSError:
            pass
        finally:
            self.kill()
            watch.join()
            relay.close()

    def kill(self) -> None:
        """Ends the engine, and what it has started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _start(
    options: Sequence[str], environment: Mapping[str, str], log: Path
) -> "subprocess.Popen[bytes]":
    own = {"WORKBENCH_PARENT": str(os.getpid())}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *options],
            env={**os.environ, **environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def _tell_end(process: "subprocess.Popen[bytes]", relay: Wire, log: Path) -> None:
    code = process.wait()
    with suppress(OSError):
        relay.say(ended=code, said=log.read_text(errors="replace")[-LAST_WORDS:])


def _stat(pid: int) -> str:
    """Returns what the kernel says of a process; "" where it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    main(sys.argv[1:])
