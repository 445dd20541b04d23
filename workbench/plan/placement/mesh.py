"""Shard and replica groups of ranks, for any group size that divides the world; and how they meet.

With world size N and group size k, rank r is in shard group r // k at position r % k:

    N = 4, k = 2     position 0   position 1
    shard group 0      rank 0       rank 1       the ranks of a row hold the pieces of one copy
    shard group 1      rank 2       rank 3
                     replica      replica        the ranks of a column hold the same piece
                     group 0      group 1

k = 1 is data parallelism (one replica group, the world); k = N is one shard group.

Source: SplitBrain's group model parallelism (arXiv:2112.15317), stated in splitbrain form as
MP_g = {r : r // k = g} and PEER_s = {r : r % k = s}.
"""

from dataclasses import dataclass, field

from workbench.plan.errors import PlanError


def group_sizes(world_size: int) -> tuple[int, ...]:
    """Every group size that divides `world_size`, ascending."""
    return tuple(k for k in range(1, world_size + 1) if world_size % k == 0)


def require_group(group_size: int | None, world_size: int) -> int:
    """The size of shard groups; None: all ranks.

    Raises:
        PlanError: the group size does not divide the world.
    """
    k = world_size if group_size is None else group_size
    if k not in group_sizes(world_size):
        valid = ", ".join(map(str, group_sizes(world_size)))
        raise PlanError(
            f"group_size {k!r} does not divide world_size {world_size}; valid are {valid}"
        )
    return k


def shard_group(rank: int, group_size: int) -> tuple[int, ...]:
    """The ranks that together hold one whole copy, `rank` among them, in order."""
    first = rank - rank % group_size
    return tuple(range(first, first + group_size))


def replica_group(rank: int, group_size: int, world_size: int) -> tuple[int, ...]:
    """The ranks that hold the same piece as `rank`, in order."""
    return tuple(range(rank % group_size, world_size, group_size))


def shard_groups(group_size: int, world_size: int) -> tuple[tuple[int, ...], ...]:
    """All shard groups, in the order of their first ranks."""
    return tuple(shard_group(rank, group_size) for rank in range(0, world_size, group_size))


def replica_groups(group_size: int, world_size: int) -> tuple[tuple[int, ...], ...]:
    """All replica groups, in the order of their first ranks."""
    return tuple(replica_group(rank, group_size, world_size) for rank in range(group_size))


@dataclass(frozen=True)
class RankConfig:
    """The settings of one rank: its number, its device, and how it connects to the others.

    Args:
        rank: the rank's number in the world.
        world_size: the number of ranks.
        address: the host of the `TCPStore` through which the ranks connect; it belongs to none of
            them.
        port: the port of the `TCPStore`.
        prefix: the prefix that separates this world's keys from others in the same store; new for
            every world.
        timeout_s: the seconds that a rank waits for the others, to connect and in every collective.
        device: the device that this rank computes on: "cpu", "cuda:0", ...
        threads: the number of threads that torch may use on this rank.
        shared_memory: whether groups whose ranks are on one host communicate through its memory,
            and not through gloo.
        host: the name of this rank's host, if several are emulated on one: ranks with different
            names share no memory. Real hosts need no names.
        secret: the text with which the notes by which these ranks find each other are under a MAC;
            nobody else knows it.
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
    secret: str = field(default="", repr=False)
