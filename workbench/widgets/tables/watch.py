"""One thread that looks at a cluster's store, at most twice a second, and tells what is new."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from workbench.store.errors import ClusterError, StoreError

if TYPE_CHECKING:
    from workbench.client.cluster import Cluster
    from workbench.store.store import Store

EVERY_S = 0.5


class Watch:
    """Looks until it is closed.

    Args:
        cluster: gives the cluster to look at; it may be another one each time.
        news: is called, on the thread, with a store that others have written to.
        gone: is called, on the thread, with why there is nothing to look at; "" when there is
            again.
        every_s: seconds between two looks.
    """

    def __init__(
        self,
        cluster: "Callable[[], Cluster]",
        news: "Callable[[Store], None]",
        gone: Callable[[str], None],
        every_s: float = EVERY_S,
    ) -> None:
        self._cluster, self._news, self._gone, self._every_s = cluster, news, gone, every_s
        self._store: Store | None = None
        self._was_gone = ""
        self._looking, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="store watch", daemon=True)

    def start(self) -> None:
        """Looks once, here, and then on the thread."""
        self.look(always=True)
        self._thread.start()

    def look(self, *, always: bool = False) -> None:
        """Tells what is new, if others wrote since this thread last looked; or in any case."""
        with self._looking:
            try:
                cluster = self._cluster()
                why = absence(cluster)
                if not why:
                    store = cluster.link.store
                    # First: what is written from here on is news the next time.
                    changed = store.changed()
                    if always or changed or store is not self._store or self._was_gone:
                        self._news(store)
                        self._store = store
            except (ClusterError, StoreError) as error:
                why = f"the cluster's store cannot be read: {error}"
            if why != self._was_gone:
                self._was_gone = why
                self._gone(why)

    def close(self) -> None:
        """Looks no more."""
        self._closing.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _follow(self) -> None:
        while not self._closing.wait(self._every_s):
            self.look()


def absence(cluster: "Cluster") -> str:
    """Why a cluster is not there, and what to do; "": it is."""
    if cluster.is_stopped:
        return (
            "This cluster was stopped; the picture is its last. cluster.restart() starts new "
            "engines, or assign another: widget.cluster = wb.Cluster(4)."
        )
    if not cluster.link.is_kept:
        return (
            f"The supervisor of cluster {cluster.name!r} has ended, and its engines with it; the "
            "picture is the last. cluster.restart() starts new ones, which go on with its jobs."
        )
    return ""
