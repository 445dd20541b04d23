"""Where one all-reduce spends its time, on each rank."""

import torch

from workbench.comm.collectives import all_gather, all_reduce
from workbench.comm.groups.world import Seat, World
from workbench.comm.pieces import accumulator
from workbench.plan.experiment import Experiment, Synchronous
from workbench.plan.phases import CollectiveTrace
from workbench.plan.placement import Shard


def trace_sums(
    seat: Seat, experiment: Experiment, *, weights: object, numel: int, times: int
) -> CollectiveTrace:
    """Sums as the experiment's gradients are, out of place, and traces it.

    All ranks leave a meeting together before each sum. Of several the trace is of the one whose
    slowest rank took the median time; one more has warmed up.

    Args:
        seat: where this rank sits.
        experiment: its algorithm and codec are used, and its precision.
        weights: of no use.
        numel: elements on each rank; normally distributed, seeded.
        times: how many sums, odd.

    Returns:
        Of the same sum on every rank.
    """
    sync = experiment.sync
    assert isinstance(sync, Synchronous)
    dtype = torch.float64 if experiment.precision == "fp64" else torch.float32
    with World.open(seat) as world:
        spec = ("trace", tuple(range(world.size)))
        group = world.groups([spec])[spec]
        generator = torch.Generator().manual_seed(world.rank)
        x = torch.randn(numel, generator=generator, dtype=dtype).to(world.device)
        keeps = sync.codec is not None and sync.codec.error_feedback
        residual = torch.zeros_like(x, dtype=accumulator(dtype)) if keeps else None
        each, found = Shard(0, (1,) * world.size), []
        for _ in range(1 + times):
            all_gather(torch.zeros(1, device=x.device), each, group)
            with world.recorder.tracing() as traces:
                all_reduce(
                    x,
                    group,
                    algorithm=sync.algorithm,
                    codec=sync.codec,
                    residual=residual,
                    layer="gradients",
                )
            found += traces
        mine = torch.tensor([[trace.seconds for trace in found[1:]]], device=x.device)
        slowest = all_gather(mine, each, group).amax(0)
        return found[1 + int(slowest.argsort()[times // 2])]
