"""Starts a controller or an engine so that it never outlives the process that wanted it.

Run as a file, not as a module, because a controller has no use for torch and so must not
import the package: `python -P spawn.py MODULE [ARGUMENT ...]` runs `python -m MODULE ...`
after preparing the process as its environment says:

    WORKBENCH_PARENT    process id of the parent; when it is gone, this process ends itself
    WORKBENCH_CORES     logical cores to run on, "0,1"; absent: all
    WORKBENCH_PRELOAD   modules to import first, "torch,numpy"; they are imported before
                        an engine registers, so that an engine that is there is ready to work
    WORKBENCH_GROUP     the file of a control group that takes processes in; absent: none does
    WORKBENCH_CONNECT   the file in which the controller says how to reach it; it is waited
                        for here, so that engines can start together with their controller
    WORKBENCH_TEMPLATE  the end of a socket; processes are forked as it says (`template.py`)
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

WATCH_EVERY_S = 0.25
PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000
CONNECT_WITHIN_S = 60.0
SACRIFICE = "500"  # of 1000


def guard(parent: int) -> None:
    """Ends this process, and its children with it, soon after `parent` has ended.

    A thread, because it works while the main thread is blocked in a collective. Processes
    started here lead a process group of their own; that is what is killed.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_EVERY_S)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="orphan-guard", daemon=True).start()
    if sys.platform == "linux":
        # One that is paused cannot watch: whoever paused it and ended lets it go on by that.
        with suppress(OSError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def prepare(environment: dict[str, str]) -> None:
    """Makes this process what its environment says it shall be."""
    guard(int(environment["WORKBENCH_PARENT"]))
    # The controller's heart monitor is a forked child: it goes when the controller goes.
    os.register_at_fork(after_in_child=lambda: guard(os.getppid()))
    # Before a run installs its handler and after it, a late request to stop means nothing.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if "WORKBENCH_ENGINE" in environment:
        with suppress(OSError):
            # Where memory runs out, an engine goes, which another replaces; not who sees to that.
            Path("/proc/self/oom_score_adj").write_text(SACRIFICE)
    preload(environment)
    # Last, so that imports may use whichever core is idle.
    cores = environment.get("WORKBENCH_CORES", "")
    if cores and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):  # cores went away since the host was probed: run where we are
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    if "WORKBENCH_GROUP" in environment:
        Path(environment["WORKBENCH_GROUP"]).write_text(str(os.getpid()))
    if "WORKBENCH_CONNECT" in environment:
        os.environ["IPP_CONNECTION_INFO"] = connection(Path(environment["WORKBENCH_CONNECT"]))


def preload(environment: dict[str, str]) -> None:
    """Imports what the environment says; what is imported already is there at once."""
    for module in filter(None, environment.get("WORKBENCH_PRELOAD", "").split(",")):
        # What cannot be imported fails where it is used, with a traceback that reaches the user.
        with suppress(Exception):
            importlib.import_module(module)


def serve(asked: socket.socket) -> bool:
    """Forks a process for each request of the supervisor, until that closes its end.

    Returns:
        Whether this process is such a one, with its environment and output; else it is the
        template.
    """
    gc.freeze()  # collecting garbage would touch, and so copy, every page that they share
    with asked, asked.makefile("r") as requests:
        asked.sendall(b"ready\n")
        for request in requests:
            if (forked := fork()) is None:
                become(**json.loads(request))
                return True
            asked.sendall(str(forked).encode())  # 0: there was no room for it
    return False


def fork() -> int | None:
    """Forks a child of the supervisor; returns its process id, and None in it."""
    told, tell = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        try:
            engine = os.fork()
        except OSError:
            os._exit(1)
        if engine > 0:
            os.write(tell, str(engine).encode())
            os._exit(0)
        os.close(told)
        os.close(tell)
        while os.getppid() == between:  # the supervisor's child as soon as this has ended
            time.sleep(0.001)
        return None
    os.close(tell)
    os.waitpid(between, 0)
    with os.fdopen(told) as pipe:
        return int(pipe.read() or 0)


def become(environment: dict[str, str], arguments: list[str], output: str, network: str) -> None:
    """Makes a forked process what one would be that was started with these.

    Args:
        arguments: the module that it runs, and what follows it.
        network: the file of the network namespace to enter; "": none.

    Raises:
        OSError: that network, or the file, cannot be opened.
    """
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    if network:
        with open(network) as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"the network {network} cannot be entered")
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    if "numpy" in sys.modules:  # else all engines would draw the same
        sys.modules["numpy"].random.seed()


def connection(path: Path) -> str:
    """What the controller wrote; waits until all of it is there."""
    deadline = time.monotonic() + CONNECT_WITHIN_S
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError):  # not there, or half written
            text = path.read_text()
            json.loads(text)
            return text
        time.sleep(0.02)
    raise SystemExit(f"the controller did not write {path} within {CONNECT_WITHIN_S:g} s")


if __name__ == "__main__":
    if "WORKBENCH_TEMPLATE" in os.environ:
        preload(dict(os.environ))
        if not serve(socket.socket(fileno=int(os.environ["WORKBENCH_TEMPLATE"]))):
            raise SystemExit
    prepare(dict(os.environ))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
