"""Stands for an engine: `python -m workbench.hosts.remote.relay ADDRESS PORT FOLDER LEASE ...`.

The process, on the supervisor's host, that stands for an engine on another: its command line goes
before the engine's, as `nsenter`'s would. It has the agent at ADDRESS start the engine, hands on
the signals that it gets, and ends as the engine does. What the kernel says of the engine it
writes into a file, for the job server, which looks there instead of into /proc. A host that is
silent for LEASE seconds counts as lost.

SIGKILL ends it, and then the agent ends the engine. SIGSTOP would stop only the relay: who wants an
engine on another host to stand still sends SIGTSTP.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from workbench.hosts.remote.wire import KEY, Wire, introduced
from workbench.store.process import CARRIED, LOST, OWN_PID, UNREACHED, stat_file

DIAL_S = 5.0
SAY_EVERY_S = 0.25
HANDED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGTSTP: signal.SIGSTOP,
    signal.SIGCONT: signal.SIGCONT,
}
STAT_BYTES = 1024


def main(arguments: Sequence[str]) -> NoReturn:
    """Returns never: ends this process as the engine has ended."""
    address, port, place, lease, _python, *options = arguments
    folder = Path(place)
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)  # in the threads that follow, too
    try:
        key = (folder / KEY).read_bytes()
        agent = introduced(
            lambda: Wire.to(address, int(port), DIAL_S), partial(Wire.prove, key=key, first=True)
        )
        agent.say(
            options=options,
            lease_s=float(lease),
            environment=_environment(),
            log=str(folder / "agents" / f"engine-{os.environ['WORKBENCH_ENGINE']}.log"),
        )
    except OSError as error:
        print(f"nothing answers at {address}:{port}: {error}", flush=True)
        os._exit(UNREACHED)
    stat = stat_file(folder, os.getpid())
    stat.parent.mkdir(exist_ok=True)
    threading.Thread(target=_follow, args=(agent, stat, float(lease)), daemon=True).start()
    parent = int(os.environ["WORKBENCH_PARENT"])
    while os.getppid() == parent:
        got = signal.sigtimedwait(HANDED_ON, SAY_EVERY_S)
        with suppress(OSError):  # the other thread sees it as well, and why
            # CPython gives what no signal is where this process was stopped past the time.
            if got is None or got.si_signo not in HANDED_ON:
                agent.say()
            else:
                agent.say(signal=HANDED_ON[signal.Signals(got.si_signo)])
    os._exit(LOST)


def _environment() -> dict[str, str]:
    """Returns what makes the engine itself, and by which process it is known here."""
    carried = os.environ[CARRIED].split(",")
    return {**{name: os.environ[name] for name in carried}, OWN_PID: str(os.getpid())}


def _follow(agent: Wire, stat: Path, lease_s: float) -> None:
    """Takes what the agent says, and ends this process when the engine has ended."""
    code, file = LOST, os.open(stat, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        while (said := agent.hear_awake(lease_s)) is not None:
            if "ended" in said:
                print(said["said"], flush=True)
                code = said["ended"]
                break
            if said["stat"]:
                os.pwrite(file, said["stat"].encode().ljust(STAT_BYTES), 0)
        else:
            print("its host does not answer any more", flush=True)
    except OSError as error:
        print(f"its agent has gone: {error}", flush=True)
    stat.unlink(missing_ok=True)
    _end_as(code)


def _end_as(code: int) -> NoReturn:
    """Ends this process by the same signal, or with the same status."""
    if code < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)
        if -code == signal.SIGINT:  # Python would raise it
            os._exit(128 + signal.SIGINT)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(sys.argv[1:])
