"""Ranks that wait for each other in a store, before there is any connection between them."""

import time

from torch.distributed.distributed_c10d import Store

from workbench.comm.errors import CommTimeout


def meet(
    store: Store, rank: int, size: int, occasion: str, note: str, timeout_s: float
) -> list[str]:
    """Waits, and can be interrupted, until all ranks have come here.

    Args:
        store: shared by the ranks.
        rank: this rank.
        size: how many ranks there are.
        occasion: what they come for; different from every other occasion in this store.
        note: what this rank has to say.
        timeout_s: how long to wait for the others.

    Returns:
        What each rank noted, in rank order.

    Raises:
        CommTimeout: not all ranks came; it names them.
    """
    keys = [f"{occasion}/{other}" for other in range(size)]
    store.set(keys[rank], note)
    began, pause = time.monotonic(), 0.001
    while not store.check(keys):
        if time.monotonic() - began > timeout_s:
            absent = tuple(other for other, key in enumerate(keys) if not store.check([key]))
            who = ", ".join(f"rank {other}" for other in absent)
            what = f"rank {rank} waited {timeout_s:g} s for {occasion}"
            raise CommTimeout(f"{what}; did not arrive: {who}", absent)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return [store.get(key).decode() for key in keys]
