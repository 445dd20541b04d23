"""The job server with fake calls: `python -m tests.server.fake_server FOLDER [SEED]`.

With a seed, the server is killed again and again, each time just before or just after something
that it does to the store, to a file or to an engine; and started again at once.
"""

import itertools
import os
import pickle
import random
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from workbench.server.attempt import Rank
from workbench.server.engine_calls import Arrival
from workbench.server.loop import Server
from workbench.store.cluster_spec import ClusterSpec
from workbench.store.process import SERVER, FolderLock
from workbench.store.store import Store


class FolderCalls:
    """Calls that are files; an engine's id is its process."""

    connection = 1

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder, self.store = folder, store
        self.seen: set[int] = set()
        self.numbers = itertools.count(time.time_ns())

    def arrivals(self):
        new = {int(path.name) for path in (self.folder / "arrivals").iterdir()} - self.seen
        self.seen |= new
        return [Arrival(pid, pid) for pid in new]

    def call(self, engine_id, given, *, job, tag):
        packed = pickle.dumps(given)
        self.store.count_message("sent", len(packed), job)
        path = self.folder / "inbox" / str(engine_id) / f"{next(self.numbers)}.call"
        part = path.with_suffix(".part")
        part.write_bytes(packed)
        part.replace(path)

    def refusals(self):
        return []

    def close(self):
        pass


KILLS = 60
MOST_EFFECTS = 14


def main(folder: Path, seed: int | None = None) -> None:
    parent = os.getppid()
    for life in itertools.count():
        if child := os.fork():
            os.waitpid(child, 0)
            if os.getppid() != parent or seed is None or life >= KILLS:
                return
        else:
            if seed is not None and life < KILLS:
                Fate(random.Random(f"{seed} {life}")).attach()
            serve(folder)


def serve(folder: Path) -> None:
    parent = os.getppid()
    with FolderLock(folder / SERVER, "job server"):
        store = Store(folder / "server.sqlite")
        server = Server(folder, ClusterSpec.load(folder), store, FolderCalls(folder, store))
        while os.getppid() == parent:
            server.tick(time.monotonic())


class Fate:
    """Kills this process at one of the next effects of what it does."""

    def __init__(self, chance: random.Random) -> None:
        self.left, self.before = chance.randint(1, MOST_EFFECTS), chance.random() < 0.5

    def attach(self) -> None:
        writing, note, call = Store._writing, Rank._note, FolderCalls.call

        @contextmanager
        def watched(store):
            with self.effect(), writing(store) as connection:
                yield connection

        def noted(rank, *arguments):
            with self.effect():
                note(rank, *arguments)

        def called(engine_calls, *arguments, **keywords):
            with self.effect():
                call(engine_calls, *arguments, **keywords)

        Store._writing, Rank._note, FolderCalls.call = watched, noted, called

    @contextmanager
    def effect(self):
        self.left -= 1
        if self.left <= 0 and self.before:
            os.kill(os.getpid(), signal.SIGKILL)
        yield
        if self.left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
