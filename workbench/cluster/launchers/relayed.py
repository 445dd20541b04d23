"""What keeper, job server and engines know of relays; see the folder's own text."""

from pathlib import Path

CARRIED = "WORKBENCH_CARRIED"
"""Names the variables that a relay hands on to its engine."""
OWN_PID = "WORKBENCH_PID"
"""Tells an engine by which process it is known where the cluster is kept."""

UNREACHED, LOST = 201, 202
ENDINGS = {
    UNREACHED: "could not be started: nothing answers on its host",
    LOST: "was lost: its host does not answer any more",
}
"""What a relay's exit status means where it is none of the engine's."""


def stat_file(folder: Path, pid: int) -> Path:
    """Where a relay writes what the kernel of the other host says of its engine.

    Args:
        folder: of the cluster.
        pid: of the relay.
    """
    return folder / "relays" / f"{pid}.stat"
