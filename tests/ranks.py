"""Runs functions on the ranks of a cluster, each time in a new world."""

import itertools
import signal
from collections.abc import Callable
from typing import Any

import ipyparallel as ipp
import torch
from torch.distributed import TCPStore

from workbench.comm.world import Seat, World


class Ranks:
    """`on_ranks(n, f, *args)` is [f(world, *args) on rank 0, on rank 1, ...].

    When a rank raises, the others are interrupted, and what it raised is raised here; the next
    call works again. Functions and what they return travel by pickle; a test module's functions
    by their name. Ranks 0..n-1 are engines 0..n-1, one thread each.
    """

    def __init__(self, client: ipp.Client) -> None:
        self._client = client
        self._numbers = itertools.count()
        # Ranks meet in a store that none of them hosts, on a port that nobody guesses.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def __call__(
        self, size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 20.0
    ) -> list[Any]:
        prefix, port = f"call{next(self._numbers)}", self._store.port
        answers = {}
        for rank, engine in enumerate(sorted(self._client.ids)[:size]):
            seat = Seat(rank, size, "127.0.0.1", port, prefix, timeout_s)
            answers[engine] = self._client[engine].apply_async(_call, seat, function, args)
        failed = _first_failure(answers)
        if failed is not None:
            self._interrupt(answers)
            failed.get()
        return [answer.get() for answer in answers.values()]

    def _interrupt(self, answers: dict[int, ipp.AsyncResult]) -> None:
        while waiting := [engine for engine, answer in answers.items() if not answer.ready()]:
            self._client.send_signal(signal.SIGINT, targets=waiting, block=True)
            for engine in waiting:
                answers[engine].wait(1.0)


def _first_failure(answers: dict[int, ipp.AsyncResult]) -> ipp.AsyncResult | None:
    """The answer that failed first; None when all have come."""
    while waiting := [answer for answer in answers.values() if not answer.ready()]:
        waiting[0].wait(0.01)
        for answer in answers.values():
            if answer.ready() and not answer.successful():
                return answer
    return None


def _call(seat: Seat, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with World.open(seat) as world:
        torch.manual_seed(0)
        return function(world, *args)
