"""What the tables of a cluster have in common: a cluster that is watched, and errands to it."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import traitlets

from workbench.widgets.errands import Errands
from workbench.widgets.live import Live
from workbench.widgets.tables.watch import Watch

if TYPE_CHECKING:
    from workbench.store.store import Store


class Board(Live):
    """A live table of what a cluster's store holds.

    A thread looks at the store at most twice a second, and reads it only when something was
    written to it. Where the cluster is gone, that is said, and the last picture stays; it goes on
    when the cluster is there again, or when another one is assigned.

    Args:
        cluster: whose.
        state: first values of other attributes.

    Raises:
        TypeError: no cluster.
    """

    cluster = traitlets.Any()

    def __init__(self, cluster: Any, **state: Any) -> None:
        require(cluster, type(self).__name__)
        self._gone, self._told = "", dict[str, str]()
        self._errands = Errands(self._heard, {})
        self._watch = Watch(lambda: self.cluster, self.take, self._note_absence)
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

    def take(self, store: "Store") -> None:
        """Reads what is shown from a store that has news, and shows it."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the view and its thread; the cluster goes on."""
        if self._begun:
            self._watch.close()
            self._errands.close()
        super().close()

    def refused(self, content: Mapping[str, Any], reason: str) -> None:
        """Shows the reason above the table."""
        self._told[""] = reason

    def settle(self, timeout: float = 60.0) -> bool:
        """Waits until all that was asked of the cluster is done; whether that was in time."""
        return self._errands.wait(timeout)

    def ask(self, key: str, work: Callable[[], object], text: str) -> None:
        """Asks something of the cluster, which may take seconds, beside everything else.

        Args:
            key: of what it is about; only one at a time is under way for each.
            work: the question; what it raises is shown at `key`.
            text: is shown at `key` meanwhile.
        """

        def errand() -> Mapping[str, Any]:
            work()
            self._watch.look(always=True)
            return {"text": ""}

        self._errands.start(key, errand, text)

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
    """The cluster; raises TypeError where it is none."""
    if not (hasattr(cluster, "link") and hasattr(cluster, "is_stopped")):
        raise TypeError(
            f"{what} takes a wb.Cluster, got {type(cluster).__name__}; wb.Cluster.attach(name) "
            "finds one that runs"
        )
    return cluster
