"""The job server with fake hands: `python -m tests.cluster.server.fake_server FOLDER`."""

import itertools
import json
import os
import pickle
import sys
import time
from pathlib import Path

from workbench.cluster.jobs.store import Store
from workbench.cluster.keeper.spec import Spec
from workbench.cluster.server.hands import Arrival
from workbench.cluster.server.lock import ServerLock
from workbench.cluster.server.loop import Server


class FolderHands:
    """Calls that are files; an engine's id is its process."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder, self.store = folder, store
        self.seen: dict[str, int] = {}
        self.numbers = itertools.count(time.time_ns())

    def arrivals(self):
        found = []
        for path in (self.folder / "arrivals").glob("[0-9]*"):
            stamp = path.stat().st_ino
            if self.seen.get(path.name) != stamp:
                self.seen[path.name] = stamp
                said = json.loads(path.read_text())
                found.append(Arrival(said["pid"], said["index"], said["pid"]))
        return found

    def call(self, engine_id, function, *arguments, job=None, tag=None):
        packed = pickle.dumps((function, arguments))
        self.store.count_message("sent", len(packed), job)
        path = self.folder / "inbox" / str(engine_id) / f"{next(self.numbers)}.call"
        part = path.with_suffix(".part")
        part.write_bytes(packed)
        part.replace(path)

    def become(self, engine_id, function, *arguments):
        self.call(engine_id, function, *arguments)

    def refusals(self):
        return []

    def close(self):
        pass


def main(folder: Path) -> None:
    with ServerLock(folder):
        store = Store(folder / "server.sqlite")
        server = Server(folder, Spec.load(folder), store, FolderHands(folder, store))
        parent = os.getppid()
        while os.getppid() == parent:
            server.tick(time.monotonic())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
