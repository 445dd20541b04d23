"""Where a rank sits: what it has to know to find the others."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Seat:
    """Where one rank sits, and where it meets the others.

    Args:
        rank: the global rank.
        world_size: the number of ranks.
        address: host of the `TCPStore` in which the ranks meet; it belongs to none of them.
        port: its port.
        prefix: keeps this world apart from others in the same store; new for every world.
        timeout_s: how long a rank waits for the others, to open and in every collective.
        device: where this rank computes: "cpu", "cuda:0", ...
        threads: the threads that torch may use on this rank.
        shared_memory: whether groups whose ranks are on one host communicate through its memory,
            and not through gloo.
        host: what this rank's host is called, where several are emulated on one: ranks that say
            different names share no memory. Hosts that differ need not be named.
    """

    rank: int
    world_size: int
    address: str
    port: int
    prefix: str
    timeout_s: float = 30.0
    device: str = "cpu"
    threads: int = 1
    shared_memory: bool = True
    host: str = ""
