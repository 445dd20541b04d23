"""Runs functions on the ranks of a cluster, one after the other in the same world."""

import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import ipyparallel as ipp
import psutil
import torch
from torch.distributed import TCPStore

from workbench.comm.groups.group import Group
from workbench.comm.groups.world import RankConfig, World
from workbench.comm.messages.recorder import Recorder

# Between tasks SIGINT would cost an engine the answer that it is about to send.
INTERRUPT = signal.SIGUSR1


class RankDied(RuntimeError):
    """The process of a rank has ended, and with it all that it was to answer."""


class Ranks:
    """`on_ranks(n, f, *args)` is [f(world, *args) on rank 0, on rank 1, ...].

    When a rank raises, the others are interrupted, and what it raised is raised here; the next
    call works again, in a new world. Else the ranks stay in theirs for the next call, if that has
    as many ranks and wants the same of them; what a function has made in it is gone then.
    Functions travel by name, what they take and return by pickle. Each rank has one thread and,
    where no other tests run beside these, a core of its own.

    Args:
        client: that of the engines.
        devices: those that ranks compute on, in turn.
    """

    def __init__(self, client: ipp.Client, devices: Sequence[str] = ("cpu",)) -> None:
        self._numbers, self._devices = itertools.count(), devices
        self._world: tuple[Any, ...] = ()  # what was wanted of the one that is open
        self._meeting = ""
        self._views = [client[engine] for engine in sorted(client.ids)]
        # Ranks meet in a store that none of them hosts, on a port that nobody guesses.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # Beside other clusters, whose ranks want the same cores, the system finds better ones.
        pinned = "PYTEST_XDIST_WORKER" not in os.environ
        settled = [
            view.apply_async(_settle, rank, os.getpid(), client.cluster.controller.pid, pinned)
            for rank, view in enumerate(self._views)
        ]
        self._pids: list[int] = [answer.get(timeout=120) for answer in settled]

    def __call__(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        shared_memory: bool = True,
        hosts: Sequence[str] = (),
        anew: bool = False,
    ) -> list[Any]:
        """The ranks are on one host, or on those that `hosts` names for them.

        A world that is opened anew is closed afterwards, in whatever state it is.
        """
        wanted = (size, timeout_s, shared_memory, *hosts)
        if anew or self._world != wanted:
            self._leave()
        self._world = ()  # until all have answered
        task = _in_a_new_world if anew else _in_a_world
        answers = self._run(size, task, function, args, timeout_s, shared_memory, hosts)
        self._world = () if anew else wanted
        return answers

    def seated(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        limit_s: float = math.inf,
    ) -> list[Any]:
        """The same for a function that opens its own world: [f(config, *args) on rank 0, ...].

        After `limit_s` all ranks are interrupted: a TimeoutError.
        """
        self._leave()
        return self._run(size, _call, function, args, timeout_s, limit_s=limit_s)

    def _leave(self) -> None:
        """All ranks leave their world; those of one that failed do at their next call."""
        if self._world:
            answers = [view.apply_async(_left) for view in self._views[: self._world[0]]]
            self._world = ()
            for answer in answers:
                answer.get(timeout=120)
        self._meeting = f"call{next(self._numbers)}"

    def _run(
        self,
        size: int,
        task: Callable[..., Any],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        timeout_s: float,
        shared_memory: bool = True,
        hosts: Sequence[str] = (),
        limit_s: float = math.inf,
    ) -> list[Any]:
        port = self._store.port
        rank_configs = [
            RankConfig(
                rank,
                size,
                "127.0.0.1",
                port,
                self._meeting,
                timeout_s,
                device=self._devices[rank % len(self._devices)],
                shared_memory=shared_memory,
                host=hosts[rank] if hosts else "",
            )
            for rank in range(size)
        ]
        answers = [
            view.apply_async(task, config, function, args)
            for view, config in zip(self._views, rank_configs, strict=False)
        ]
        try:
            failed = self._first_failure(answers, time.monotonic() + limit_s)
        except (TimeoutError, RankDied):
            self._interrupt(answers)
            raise
        if failed is not None:
            self._interrupt(answers)
            failed.get()
        return [answer.get() for answer in answers]

    @property
    def died(self) -> list[int]:
        """The ranks whose processes have ended."""
        return [rank for rank, pid in enumerate(self._pids) if not psutil.pid_exists(pid)]

    def _first_failure(
        self, answers: list[ipp.AsyncResult], until: float
    ) -> ipp.AsyncResult | None:
        """The answer that failed first; None when all have come."""
        while waiting := [rank for rank, answer in enumerate(answers) if not answer.ready()]:
            if died := sorted({*waiting} & {*self.died}):
                raise RankDied(f"the process of rank {died[0]} has ended")
            if time.monotonic() > until:
                raise TimeoutError(f"{len(waiting)} of {len(answers)} ranks do not answer")
            answers[waiting[0]].wait(0.01)
            for answer in answers:
                if answer.ready() and not answer.successful():
                    return answer
        return None

    def _interrupt(self, answers: list[ipp.AsyncResult]) -> None:
        for pid, answer in zip(self._pids, answers, strict=False):
            with suppress(ProcessLookupError):
                while not answer.ready():
                    os.kill(pid, INTERRUPT)
                    answer.wait(0.5)


def _settle(rank: int, owner: int, controller: int, pinned: bool) -> int:
    """Prepares an engine; returns its process id."""
    signal.signal(INTERRUPT, signal.SIG_IGN)
    threading.Thread(target=_guard, args=(owner, controller), daemon=True).start()
    if pinned and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    return os.getpid()


def _guard(owner: int, controller: int) -> None:
    """Ends the cluster soon after the tests have ended, however they did."""
    with suppress(ProcessLookupError):
        while True:
            os.kill(owner, 0)
            time.sleep(0.5)
    with suppress(ProcessLookupError):
        os.kill(controller, signal.SIGTERM)
    os._exit(1)


def _call(config: RankConfig, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if _held and _held[0].meeting != config.prefix:
        _left()
    signal.signal(INTERRUPT, signal.default_int_handler)
    try:
        torch.manual_seed(0)
        return function(config, *args)
    finally:
        signal.signal(INTERRUPT, signal.SIG_IGN)


def _in_a_world(config: RankConfig, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return _call(config, _opened, (function, args))


def _in_a_new_world(config: RankConfig, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return _call(config, _opened_anew, (function, args))


def _opened_anew(config: RankConfig, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with World.open(config) as world:
        return function(world, *args)


def _opened(config: RankConfig, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Calls a function in the world of this process, which is opened where there is none."""
    if not _held:
        entered = ExitStack()
        _held.append(_Held(config.prefix, entered, entered.enter_context(World.open(config))))
    held = _held.pop()
    with held.leaving as leaving:
        answer = function(held.world, *args)
        held.world.let_go([SimpleNamespace(link=link) for link in held.world._links])
        held.world.recorder = Recorder()
        _held.append(replace(held, leaving=leaving.pop_all()))
    return answer


@dataclass(frozen=True)
class _Held:
    """A world in which this process is a rank, and where the ranks of it have met."""

    meeting: str
    leaving: ExitStack
    world: World


_held: list[_Held] = []
"""None or one: between two calls an engine remembers nothing but what lies in a module."""


def _left() -> None:
    _held.pop().leaving.close()


def gpus() -> list[str]:
    """The GPUs that torch sees."""
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def all_ranks(world: World, purpose: str = "world") -> Group:
    """A group of all ranks of `world`."""
    spec = (purpose, tuple(range(world.size)))
    return world.groups([spec])[spec]
