"""What the tables of a cluster have in common: a cluster that is watched, and what is asked of it.

One thread looks at the cluster's store, at most twice a second, and tells what is new.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import traitlets

from workbench.client.cluster import Cluster
from workbench.plan.io.html import Markup, element, table
from workbench.store.errors import ClusterError, StoreError
from workbench.store.store import Store
from workbench.widgets.base.widget import BackgroundTasks, Live, View

EVERY_S = 0.5
_MOST_LETTERS = 60  # of a name or reason


class StoreWatcher:
    """Looks until it is closed.

    Args:
        cluster: gives the cluster to look at; it may be another one each time.
        gone: Called, on the thread, with why there is nothing to look at; "" when there is again.
    """

    def __init__(
        self,
        cluster: Callable[[], Cluster],
        news: Callable[[Store], None],
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


def absence(cluster: Cluster) -> str:
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


class ClusterTable(Live):
    """A live table of what a cluster's store holds.

    A thread looks at the store at most twice a second, and reads it only when something was
    written to it. Where the cluster is gone, that is said, and the last picture stays; it goes on
    when the cluster is there again, or when another one is assigned.

    Args:
        cluster: the cluster whose store is shown.
        state: first values of other attributes.

    Raises:
        TypeError: no cluster.
    """

    cluster = traitlets.Any()

    def __init__(self, cluster: Any, **state: Any) -> None:
        require(cluster, type(self).__name__)
        self._gone, self._told = "", dict[str, str]()
        self._tasks = BackgroundTasks(self._heard, {})
        self._watch = StoreWatcher(lambda: self.cluster, self.take, self._note_absence)
        super().__init__(cluster=cluster, **state)
        self._watch.start()
        self._view = self._shown

    @property
    def gone(self) -> str:
        """Why the cluster is not there, and what to do; "": it is."""
        return self._gone

    def look(self) -> None:
        """Looks at the store now, instead of within half a second."""
        self._watch.look(always=True)

    def take(self, store: Store) -> None:
        """Reads what is shown from a store that has news, and shows it."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the view and its thread; the cluster goes on."""
        if self._begun:
            self._watch.close()
            self._tasks.close()
        super().close()

    def refused(self, content: Mapping[str, Any], reason: str) -> None:
        """Shows the reason above the table."""
        self._told[""] = reason

    def settle(self, timeout: float = 60.0) -> bool:
        """Waits until all that was asked of the cluster is done; whether that was in time."""
        return self._tasks.wait(timeout)

    def ask(self, key: str, work: Callable[[], object], text: str) -> None:
        """Asks something of the cluster, which may take seconds, beside everything else."""

        def task() -> Mapping[str, Any]:
            work()
            self._watch.look(always=True)
            return {"text": ""}

        self._tasks.start(key, task, text)

    def _heard(self, key: str, state: Mapping[str, Any]) -> None:
        with self._guard:
            self._told.pop("", None)
            self._told[key] = state["text"]
            self.refresh()

    def _note_absence(self, why: str) -> None:
        with self._guard:
            self._gone = why
            self.refresh()
            self.keep_soon()

    @traitlets.validate("cluster")
    def _is_a_cluster(self, proposal: Mapping[str, Any]) -> Any:
        return require(proposal["value"], type(self).__name__)

    @traitlets.observe("cluster")
    def _another(self, change: Mapping[str, Any]) -> None:
        if self._begun:
            self._watch.look(always=True)


def require(cluster: Any, what: str) -> Any:
    """The cluster, checked.

    Raises:
        TypeError: it is no cluster.
    """
    if not (hasattr(cluster, "link") and hasattr(cluster, "is_stopped")):
        raise TypeError(
            f"{what} takes a wb.Cluster, got {type(cluster).__name__}; wb.Cluster.attach(name) "
            "finds one that runs"
        )
    return cluster


def table_html(
    view: View, title: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]
) -> Markup:
    """A table as it was last, in HTML without scripts."""
    gone = [element("p", view["gone"])] if view["gone"] else []
    listed = [table(head, rows)] if rows else []
    return element("div", element("p", element("b", title)), *gone, *listed)


def brief(text: str) -> str:
    """The first line of a name or reason, shortened where it is long."""
    line = text.partition("\n")[0]
    return line if len(line) <= _MOST_LETTERS else f"{line[: _MOST_LETTERS - 1]}…"
