"""`search`: the plan with the least predicted step time that fits into memory."""

import time
from collections.abc import Mapping, Sequence

from workbench.plan.experiment import Experiment, Optimizer
from workbench.plan.graph import Graph
from workbench.plan.machine import Machine
from workbench.predict.search.limit.memory_limit import bytes_of
from workbench.predict.search.question import asked
from workbench.predict.search.result import SearchResult
from workbench.predict.search.searching import Searching
from workbench.predict.search.space.choices import Pin, Shares
from workbench.predict.uncollected import uncollected


def search(
    graph: Graph,
    machine: Machine,
    world_size: int,
    memory_limit: float | str | None = None,
    *,
    experiment: Experiment | None = None,
    batch_size: int | None = None,
    optimizer: Optimizer | None = None,
    precision: str | None = None,
    pin: Mapping[str, Pin] | None = None,
    group_sizes: Sequence[int] | None = None,
    shares: Sequence[Shares] | bool = True,
    rounds: bool = True,
    recompute: bool = True,
    time_limit: float = 10.0,
) -> SearchResult:
    """Finds the plan with the least predicted step time under a memory limit of each rank.

    Args:
        graph: the model.
        machine: that it is to run on: measured, or a preset.
        world_size: number of ranks.
        memory_limit: bytes of a rank, or text such as "2GiB"; None: what the devices have.
        experiment: how it is run; its plan is put aside, but for its mode of batch norm.
        batch_size: of the whole world, instead of the experiment's.
        optimizer: instead of the experiment's.
        precision: instead of the experiment's.
        pin: what is decided already: a scheme or a LayerPlan by the name of a layer, or by a
            pattern such as "features.*", which means the layers that fit and can be split.
        group_sizes: to consider, besides 1; None: all that divide the world.
        shares: unequal shares to consider beside equal ones. True: by the speed of the machine's
            devices, where they differ. False: none.
        rounds: whether a sharded tail may run in rounds.
        recompute: whether layers may be computed again in backward.
        time_limit: seconds of work after which a search gives what it has; among many plans it
            ends before that once no plan can be faster by more than 1 %.

    Raises:
        MemoryLimitError: no plan fits; it says the least that one needs, and holds that plan.
        PlanError: a pin, a group size or a limit that cannot be.
        MachineError: a machine of another world size.
        ExperimentError: an experiment that cannot be predicted.
    """
    began = time.perf_counter()
    question = asked(
        graph,
        machine,
        world_size,
        None if memory_limit is None else bytes_of(memory_limit),
        experiment=experiment,
        batch_size=batch_size,
        optimizer=optimizer,
        precision=precision,
        pin=pin,
        group_sizes=group_sizes,
        shares=shares,
        rounds=rounds,
        recompute=recompute,
        seconds=time_limit,
    )
    with uncollected():
        return Searching(question, began).result()
