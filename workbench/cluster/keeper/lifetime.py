"""How long a cluster stays."""

from workbench.cluster.jobs.record import State
from workbench.cluster.jobs.store import Store
from workbench.cluster.keeper.spec import Spec

# A job that is paused waits for people, however long; it goes on when somebody attaches again.
UNFINISHED: tuple[State, ...] = ("queued", "starting", "running", "stopping")


class Lifetime:
    """A cluster stays while somebody is attached to it or a job is unfinished, and a while more.

    Args:
        spec: of the cluster.
        store: its state.
        now: seconds of a monotonic clock.
    """

    def __init__(self, spec: Spec, store: Store, now: float) -> None:
        self._spec, self._store, self._needed_at = spec, store, now

    def is_over(self, now: float) -> str:
        """Why the cluster shall end, for people; "" where it shall stay."""
        bound_to = self._spec.bound_to
        if bound_to is not None and not bound_to.is_alive:
            return f"process {bound_to.pid} has ended, and the cluster is bound to it"
        if self._is_needed():
            self._needed_at = now
        if now - self._needed_at > self._spec.linger_s:
            return f"nobody was attached, and nothing to be done, for {self._spec.linger_s:g} s"
        return ""

    def _is_needed(self) -> bool:
        owners = self._store.owners()
        for owner in owners:
            if not owner.is_alive:
                self._store.detach(owner)
        if any(owner.is_alive for owner in owners):
            return True
        return bool(self._store.jobs(states=UNFINISHED))
