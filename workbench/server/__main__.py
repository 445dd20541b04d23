"""`python -m workbench.server FOLDER`: serves the cluster of a folder.

It may be killed at any time, and started again: what runs is not disturbed, nothing is lost and
nothing is started twice (`job_runner` says why).
"""

import logging
import sys
from pathlib import Path

from workbench.server.engine_calls import ControllerCalls, Count
from workbench.server.loop import Server
from workbench.store.cluster_spec import ClusterSpec
from workbench.store.cluster_store import open_store
from workbench.store.errors import ClusterError
from workbench.store.process import SERVER, FolderLock
from workbench.store.store import Store


def main(folder: Path) -> None:
    """Serves until this process is ended.

    Raises:
        SystemExit: another server has the folder, or its store cannot be used; the text says why.
    """
    logging.basicConfig(format="%(asctime)s %(message)s")
    try:
        spec = ClusterSpec.load(folder)
        with FolderLock(folder / SERVER, "job server"):
            store = open_store(folder, create=True)
            store.check()
            engine_calls = ControllerCalls(folder, count_in(store))
            Server(folder, spec, store, engine_calls).run()
    except ClusterError as error:
        raise SystemExit(f"no job server: {error}") from None


def count_in(store: Store) -> Count:
    """Writes each message down."""

    def count(direction: str, num_bytes: int, job: int | None) -> None:
        store.count_message("sent" if direction == "sent" else "received", num_bytes, job)

    return count


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
