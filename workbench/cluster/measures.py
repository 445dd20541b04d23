"""What a cluster finds out by running something small on its engines, and waiting for it."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from workbench.cluster import message, sum_trace
from workbench.cluster.assistant import complete
from workbench.cluster.dispatch import Dispatch
from workbench.cluster.resume import checkpoint_of
from workbench.cluster.run import Run
from workbench.cluster.sum_trace import SumTrace
from workbench.plan.all_reduce import Algorithm
from workbench.plan.codec import Codec
from workbench.plan.experiment import Experiment
from workbench.plan.plan import Plan
from workbench.plan.stability import Curvature


class Running(Protocol):
    """Whoever has engines to call functions on."""

    _dispatch: Dispatch

    def __len__(self) -> int: ...

    def call(
        self,
        task: str,
        experiment: Experiment,
        *,
        module: nn.Module | None = None,
        **keywords: Any,
    ) -> list[Any]: ...

    def _taken(self, plan: Plan, holder: str) -> AbstractContextManager[tuple[int, ...]]: ...


class Measures:
    """A part of `Cluster`."""

    def curvature(
        self: Running,
        experiment: Experiment,
        *,
        resume: str | Path | Run | None = None,
        module: nn.Module | None = None,
        batches: int = 2,
    ) -> Curvature:
        """Measures the loss's largest curvature, by up to 40 gradients of each batch; waits for it.

        It is that of the weights given, and grows or falls as they are trained.

        Args:
            experiment: whose loss; its strategy does not matter.
            resume: as in `train`: measured at the weights that a run would go on from.
            module: as in `train`.
            batches: over which the loss is a mean.

        Raises:
            ClusterError: the plan needs more engines than are here, or free.
            RunError: a rank failed.
        """
        task = "workbench.train.curvature:measure_curvature"
        start = checkpoint_of(resume, experiment.plan.graph)
        found = self.call(task, experiment, module=module, resume=start, batches=batches)
        measured: Curvature = found[0]
        return measured

    def trace_all_reduce(
        self: Running,
        nbytes: int,
        *,
        algorithm: Algorithm = "auto",
        codec: str | Codec | None = None,
        times: int = 5,
    ) -> SumTrace:
        """Shows where an all-reduce over all engines spends its time, phase by phase.

        Args:
            nbytes: on each rank, in fp32.
            algorithm: who sums what.
            codec: what values become while they travel.
            times: of so many, that of median time is shown; odd.

        Raises:
            ValueError: there is no such algorithm or codec, they do not go together, or there is
                nothing to trace.
            ClusterError: an engine is not free.
            RunError: a rank failed.
        """
        if nbytes < 4 or times % 2 == 0:
            raise ValueError(f"needs 4 bytes or more and an odd count, got {nbytes} and {times}")
        experiment = sum_trace.experiment_for(len(self), algorithm, codec)
        task = "workbench.train.tracing_sums:trace_sums"
        with self._taken(experiment.plan, "a trace of an all-reduce") as places:
            shared = {"weights": None, "numel": nbytes // 4, "times": times}
            packed = message.pack(experiment)
            ranks = complete(self._dispatch.start(task, packed, places, shared))
        return sum_trace.described(experiment, nbytes, ranks)
