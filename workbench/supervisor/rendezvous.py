"""`python -m workbench.supervisor.rendezvous FOLDER ADDRESS PORT TIMEOUT_S`: where ranks meet.

torch's store, for all jobs of a cluster, which none of them takes along when it ends. It is a
process of its own, so that the supervisor does without torch.
"""

import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from workbench.store.cluster_store import open_store
from workbench.store.process import RENDEZVOUS, FolderLock
from workbench.supervisor.starting import MEETING


def main(folder: Path, address: str, port: int, timeout_s: float) -> None:
    """Opens the store, says where, and keeps it open.

    Args:
        port: the port; 0: any that is free.
        timeout_s: how long a rank waits for a value [s].

    Raises:
        ClusterError: there is another in that folder.
    """
    # The port is bound here and handed over open, so nobody can take it in between; and left to
    # itself the store would listen on all interfaces.
    listener = socket.create_server((address, port))
    port = listener.getsockname()[1]
    _meeting = dist.TCPStore(  # type: ignore[attr-defined]  # torch's stubs lack it
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=timeout_s),
    )
    with FolderLock(folder / RENDEZVOUS, "store where ranks meet"):
        open_store(folder).set_meta(MEETING, f"{address}:{port}")
        threading.Event().wait()  # the store is there as long as this is


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
