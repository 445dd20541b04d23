"""What ranks on emulated hosts say of themselves."""

import os
from pathlib import Path

import torch

from workbench.comm.all_reduce import all_reduce
from workbench.comm.groups.world import RankConfig, World


def look(
    config: RankConfig, *, experiment: object, weights: Path, groups: list[tuple[int, ...]]
) -> dict:
    """This rank's network, and how it communicates, and that it does, in each of its groups."""
    specs = [("look", ranks) for ranks in groups]
    with World.open(config) as world:
        found = world.groups(specs)
        one = torch.ones(1, dtype=torch.float64)
        return {
            "network": os.stat("/proc/self/ns/net").st_ino,
            "interface": os.environ["GLOO_SOCKET_IFNAME"],
            "group": [line for line in open("/proc/self/cgroup") if "cpu" in line or "::" in line],
            "transports": {ranks: group.transport for (_, ranks), group in found.items()},
            "sums": {ranks: all_reduce(one, group).item() for (_, ranks), group in found.items()},
        }
