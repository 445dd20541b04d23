"""Doing something on all ranks, or failing on all of them."""

from collections.abc import Callable

import torch

from workbench.comm.collectives import all_gather, all_reduce
from workbench.comm.groups.group import Group
from workbench.model.errors import CheckpointError
from workbench.plan.placement import Shard


def on_all_ranks(group: Group, action: Callable[[], object] | None) -> None:
    """Runs this rank's action, and returns once every rank's is done.

    One small all-reduce; the texts travel only where something failed.

    Args:
        group: all ranks that take part.
        action: to write something; None for a rank that only waits.

    Raises:
        CheckpointError: an action failed on some rank; raised on all, with each failed rank's
            own text.
    """
    problem = ""
    try:
        if action is not None:
            action()
    except (CheckpointError, OSError) as error:
        problem = str(error)
    text = torch.tensor(list(problem.encode()), dtype=torch.int64)
    lengths = torch.zeros(group.size, dtype=torch.int64)
    lengths[group.rank] = len(text)
    lengths = all_reduce(lengths, group, layer="checkpoint")
    if not lengths.any():
        return
    texts = all_gather(text, Shard(0, tuple(lengths.tolist())), group, layer="checkpoint")
    raise CheckpointError(
        "; ".join(
            f"rank {rank}: {bytes(part.tolist()).decode()}"
            for rank, part in zip(group.ranks, texts.split(lengths.tolist()), strict=True)
            if len(part)
        )
    )
