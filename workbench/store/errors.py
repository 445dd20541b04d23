"""What can go wrong with a cluster and what runs on it."""


class ClusterError(RuntimeError):
    """The cluster cannot do what was asked; the text says why and what to do."""


class ControlMessageTooLarge(ClusterError):
    """A message to an engine is larger than control messages may be."""


class StoreError(ClusterError):
    """The file that holds a cluster's jobs cannot be used; the text says what to do."""


class StoreDamaged(StoreError):
    """The file that holds a cluster's jobs is damaged; it is made again from its runs' folders."""


class HostsError(ClusterError):
    """Emulated hosts cannot be made, or removed; the text says why, and what works without."""


class RunError(RuntimeError):
    """A run, or a verification, ended before its time."""


class EngineDied(RunError):
    """An engine's process ended while it computed.

    Attributes:
        rank: the first rank that was lost.
        death: how its process ended, "was ended by SIGKILL".
    """

    def __init__(self, message: str, rank: int, death: str) -> None:
        super().__init__(message)
        self.rank, self.death = rank, death


class RankError(RunError):
    """A rank raised an exception.

    Attributes:
        rank: the rank that failed first.
        layer: the layer in which it failed; None where that is not known.
        kind: the exception's class.
        text: the exception's own text.
        remote_traceback: the rank's own traceback.
    """

    def __init__(
        self,
        message: str,
        rank: int,
        *,
        layer: str | None = None,
        kind: str = "",
        text: str = "",
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.rank, self.layer, self.kind, self.text = rank, layer, kind, text
        self.remote_traceback = remote_traceback


class Diverged(RunError):
    """The loss is no number any more; the last checkpoint is kept."""
