"""Sums on the ranks of a cluster: what they are, and what was recorded of them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workbench.comm.all_reduce import all_reduce
from workbench.comm.groups.world import RankConfig, World
from workbench.comm.messages.recorder import BytesBySender
from workbench.plan.experiment.experiment import Experiment, Synchronous


@dataclass(frozen=True)
class RecordedSum:
    """One sum on one rank.

    Attributes:
        digest: the digest of the sum's bits.
        error: the largest difference to what one process sums, relative to the sum of magnitudes.
        messages: the non-empty messages that this rank received.
        bytes: the bytes of these messages from each rank [ranks].
    """

    digest: str
    error: float
    messages: int
    bytes: tuple[int, ...]


def recorded_sums(
    config: RankConfig, experiment: Experiment, *, weights: object, lengths: Sequence[int]
) -> list[RecordedSum]:
    """Sums normally distributed values of fp32 as the experiment's gradients are.

    Args:
        config: the place of this rank.
        experiment: its algorithm and codec are used.
        weights: the initial weights; they are not read.
        lengths: the elements on each rank, one or more, all different.

    Returns:
        For each length, what this rank has and received.
    """
    sync = experiment.sync
    assert isinstance(sync, Synchronous)
    algorithm, codec, found = sync.algorithm, sync.codec, []
    with World.open(config) as world:
        spec = ("check", tuple(range(world.size)))
        group = world.groups([spec])[spec]
        for length in lengths:
            x, label = _summand(length, world.rank).to(world.device), str(length)
            keeps = codec is not None and codec.error_feedback
            left = torch.zeros_like(x) if keeps else None
            world.recorder.by_sender = by_sender = BytesBySender()
            total = all_reduce(
                x, group, algorithm=algorithm, codec=codec, residual=left, layer=label
            ).cpu()
            world.recorder.by_sender = None
            exact = torch.stack([_summand(length, rank) for rank in range(world.size)]).double()
            off, size = (total - exact.sum(0)).abs(), exact.abs().sum(0)
            from_rank = {sender: size for _, _, sender, size in by_sender.rows()}
            (row,) = [row for row in world.recorder.rows() if row.layer == label]
            found.append(
                RecordedSum(
                    hashlib.blake2b(total.numpy().tobytes(), digest_size=16).hexdigest(),
                    float((off / size.clamp_min(1e-30)).max()),
                    row.messages,
                    tuple(from_rank.get(rank, 0) for rank in range(world.size)),
                )
            )
    return found


def _summand(length: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * length + rank)
    return torch.randn(length, generator=generator)
