"""What a cluster can be asked about its engines, links, plans and models, and waits for."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from torch import nn

from workbench.client import verifying
from workbench.client.assistant import Assistant
from workbench.client.calibration import calibrate, sum_trace
from workbench.client.calibration.sum_trace import SumTrace
from workbench.client.leases import Dispatch
from workbench.client.run.resume import checkpoint_of
from workbench.client.run.run import Run
from workbench.hosts.emulated.hosts import Hosts
from workbench.plan.all_reduce import Algorithm
from workbench.plan.codec import Codec
from workbench.plan.experiment import SGD, Adam, AdamW, Experiment
from workbench.plan.graph import Graph
from workbench.plan.machine import Machine
from workbench.plan.plan import Plan
from workbench.plan.stability import Curvature
from workbench.store import message
from workbench.store.device import Device
from workbench.train.loop.objective import RowLoss
from workbench.train.verify.verification import Verification


class Measurements(ABC):
    """Of devices, links, layers, collectives, losses and exactness; a part of `Cluster`."""

    devices: tuple[Device, ...]
    hosts: Hosts | None
    _assistant: Assistant
    _dispatch: Dispatch

    @abstractmethod
    def __len__(self) -> int:
        """How many engines there are."""

    @abstractmethod
    def _taken(self, plan: Plan, holder: str) -> AbstractContextManager[tuple[int, ...]]:
        """Engines for a plan's ranks for as long as the body runs."""

    def calibrate(
        self,
        *what: Graph | Plan,
        rows: int | Sequence[int] = (8, 32),
        precision: Literal["fp32", "bf16", "fp64"] = "fp32",
        optimizer: SGD | Adam | AdamW | None = None,
        data: Any = None,
        within_s: float = 60.0,
        fresh: bool = False,
        module: nn.Module | None = None,
        machine: Machine | None = None,
        keep: bool = True,
    ) -> Machine:
        """Measures devices, links and the layers of plans, on all engines at once.

        What was measured before on this hardware is kept in the platform's folder for caches and
        only completed, so that a second call returns at once. An interrupt loses what was being
        measured, not what was found.

        Args:
            what: plans, all for one number of ranks; or graphs, of which data-parallel and hybrid
                plans over all engines are measured. Nothing: only devices and links.
            rows: of a batch on each rank. Of two, times at others follow by interpolation.
            precision: of the layers.
            optimizer: whose updates are measured in place; None: SGD with momentum.
            data: as in `Experiment`, whose loading is measured; None: synthetic.
            within_s: about how many seconds it may take; with less, errors are larger.
            fresh: forget what was measured before.
            module: as in `train`.
            machine: what was measured of these engines, to be completed instead of what is kept.
            keep: False: what is kept stays as it is, and is not looked at.

        Raises:
            TypeError: something else than graphs and plans.
            ValueError: plans for different numbers of ranks, no rows, no time, or hosts with
                different numbers of ranks.
            ClusterError: a plan needs more engines than are here, or free.
            RunError: a rank failed.
        """
        counts = calibrate.rows_of(rows)
        if not 0 < within_s < float("inf"):
            raise ValueError(f"within_s must be a positive number of seconds, got {within_s!r}")
        plans = calibrate.plans_of(what, len(self))
        wish = calibrate.CalibrationSpec(counts, precision, optimizer, data, within_s)
        with self._taken(plans[0], "a calibration") as places:
            devices = [self.devices[place] for place in places]
            calibration = calibrate.Calibration(
                places, devices, self.hosts, self._assistant, self._dispatch
            )
            return calibration.carry_out(
                plans, wish, module, fresh=fresh, machine=machine, keep=keep
            )

    def trace_all_reduce(
        self,
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
        task = "workbench.train.trace.sums:trace_sums"
        with self._taken(experiment.plan, "a trace of an all-reduce") as places:
            shared = {"weights": None, "numel": nbytes // 4, "times": times}
            packed = message.pack(experiment)
            ranks = self._dispatch.called(task, packed, places, shared)
        return sum_trace.described(experiment, nbytes, ranks)

    def curvature(
        self,
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
        task = "workbench.train.measure.curvature:measure_curvature"
        start = checkpoint_of(resume, experiment.plan.graph)
        found = self.call(task, experiment, module=module, resume=start, batches=batches)
        measured: Curvature = found[0]
        return measured

    def verify(
        self,
        plan: Plan,
        *,
        batch_size: int | None = None,
        steps: int = 2,
        precision: Literal["fp64", "fp32"] = "fp64",
        optimizer: SGD | Adam | AdamW | None = None,
        data: Any = None,
        seed: int = 0,
        module: nn.Module | None = None,
        loss: RowLoss | None = None,
        repeat: bool = True,
    ) -> Verification:
        """Holds the split model against the unsplit one, with the same weights and data.

        Compared are outputs and gradients of the first step; weights, buffers and what the
        optimizer remembers after the last; loss and accuracy of a test batch in evaluation mode.
        And the split model is trained twice, which is to leave the same bits.

        Weights that start as one constant (biases, norms) get some noise: else a bias that is
        added twice would go unseen.

        Args:
            plan: how the model is split.
            batch_size: of the whole world; None: 4 rows for each rank.
            steps: optimizer updates before weights are compared.
            precision: "fp64" or "fp32".
            optimizer: None: SGD with momentum.
            data: as in `Experiment`; None: synthetic.
            seed: of weights, data and dropout.
            module: as in `train`.
            loss: your own, (outputs, labels) -> one value for each row, [rows]; outputs are what
                the module returns, one tensor or a tuple of them. The gradient is that of the
                mean over the batch. None: cross-entropy.
            repeat: train the split model twice; without, it takes less time.

        Raises:
            ClusterError: the plan needs more engines than are here, or free.
            RunError: a rank failed.
        """
        if not isinstance(plan, Plan):
            raise TypeError(f"verify takes a Plan, got {type(plan).__name__}")
        experiment = verifying.experiment_for(
            plan,
            batch_size=batch_size,
            steps=steps,
            precision=precision,
            optimizer=optimizer,
            data=data,
            seed=seed,
        )
        with self._taken(plan, f"a verification of {plan.graph.source.name}") as places:
            return verifying.carry_out(
                experiment,
                module,
                places,
                self._assistant,
                self._dispatch,
                loss=loss,
                repeat=repeat,
            )

    def call(
        self,
        task: str,
        experiment: Experiment,
        *,
        module: nn.Module | None = None,
        **keywords: Any,
    ) -> list[Any]:
        """Calls a function on every rank of an experiment's plan, and waits for all.

        Args:
            task: "module:function"; each rank gets `seat`, `experiment`, `weights` (the file of
                the initial weights) and the keywords.
            experiment: what the function is about.
            module: as in `train`.
            keywords: small further arguments.

        Returns:
            What each rank returned.

        Raises:
            ClusterError: the plan needs more engines than are here, or free.
            RunError: a rank failed.
        """
        packed = message.pack(experiment)
        with self._taken(experiment.plan, f"a call of {task}") as places:
            own = self._assistant.values_of(experiment, module)
            shared = {"weights": own or self._assistant.weights(packed), **keywords}
            return self._dispatch.called(task, packed, places, shared)
