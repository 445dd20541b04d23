"""The engines of this host, or of emulated ones, as one object in a notebook."""

import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from torch import nn

from workbench.cluster import calibrate, files, message, report, sum_trace, verifying
from workbench.cluster.assistant import Assistant, complete
from workbench.cluster.beginning import Beginning
from workbench.cluster.devices import Device
from workbench.cluster.dispatch import Dispatch
from workbench.cluster.emulated.hosts import Hosts
from workbench.cluster.engines import Engines, Ledger
from workbench.cluster.errors import ClusterError
from workbench.cluster.ground import Ground, ground_of
from workbench.cluster.job import Job
from workbench.cluster.resume import again, checkpoint_of
from workbench.cluster.run import Launch, Release, Run
from workbench.cluster.sum_trace import SumTrace
from workbench.plan import stability
from workbench.plan.all_reduce import Algorithm
from workbench.plan.codec import Codec
from workbench.plan.experiment import SGD, Adam, AdamW, Experiment
from workbench.plan.graph import Graph
from workbench.plan.machine import Machine
from workbench.plan.plan import Plan
from workbench.plan.stability import Curvature
from workbench.train.verification import Verification

STOP_RUNS_WITHIN_S = 10.0


class Cluster:
    """Engines on this host, each on a GPU where there are any, else on its own cores.

    Ready when it is made. Ends with `stop()`, at the end of a `with` block, when it is no
    longer referred to, and with this process, however that ends.

    Args:
        n: number of engines.
        hosts: emulated hosts to run on, each with as many engines as the others, give or take
            one: with 4 engines on 2 hosts, 0 and 1 are on the first. Where they are not there
            yet, they are started now and end with the cluster.
        directory: where runs keep their files, each in a folder of its own.
        timeout: seconds that a rank waits for the others before it reports who is missing.

    Attributes:
        devices: what each engine computes on.
        hosts: as given.
        directory: as given, absolute.
        task: "module:function" that each rank of a run calls.

    Raises:
        ValueError: `n` is no positive integer, or less than there are emulated hosts.
        HostsError: the emulated hosts could not be made.
        ClusterError: the engines did not start; the text holds what they wrote.
    """

    task = "workbench.train.session:train"

    def __init__(
        self,
        n: int,
        *,
        hosts: Hosts | None = None,
        directory: str | Path = "runs",
        timeout: float = 30.0,
    ) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"a cluster has a positive number of engines, got {n!r}")
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
        if hosts is not None:
            if not isinstance(hosts, Hosts):
                raise TypeError(f"hosts are made by wb.Hosts(...), got {type(hosts).__name__}")
            hosts.seating(n)  # raises if there are too few engines
        self._n, self.hosts = n, hosts
        self.directory = Path(directory).resolve()
        self._timeout = timeout
        self._lock = threading.RLock()
        self._runs: list[Run] = []
        self._start()

    def _start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        files.sweep(self.directory)
        ground = ground_of(self._n, self.hosts)
        self.devices: tuple[Device, ...] = ground.devices[: self._n]
        scratch = files.new_scratch(self.directory)
        try:
            engines = Engines(ground, scratch, at_once=range(self._n))
        except BaseException:
            ground.leave()
            raise
        self._engines, self._assistant = engines, Assistant(engines, self._n)
        self._dispatch = Dispatch(engines, self.devices, self._timeout)
        # Also when the last reference goes, and before the interpreter does.
        self._end = weakref.finalize(self, _end, engines, ground)
        if self.hosts is not None:
            self.hosts.attach(self)

    def train(
        self,
        experiment: Experiment,
        *,
        resume: str | Path | Run | None = None,
        module: nn.Module | None = None,
        curvature: Curvature | None = None,
    ) -> Run:
        """Starts an experiment and returns at once.

        Args:
            experiment: what to run.
            resume: a checkpoint under any plan of this model, or a run (or its folder) that
                left one, to go on from.
            module: the user's own module, where the model was traced from one: its values are
                the initial weights. Not needed with `resume`.
            curvature: as `curvature` has measured it: then a warning, and a note on the run, say
                if a pipelined experiment is likely to diverge. Without it nothing is claimed.

        Raises:
            ClusterError: the plan needs more engines than are here, or free.
            CheckpointError: what to go on from is damaged, missing or of another model.
            ModelError: `module` is missing, or is another one than was traced.
            ControlMessageTooLarge: the model's own code is too large for a control message.
        """
        if not isinstance(experiment, Experiment):
            raise TypeError(f"train takes an Experiment, got {type(experiment).__name__}")
        checkpoint = checkpoint_of(resume, experiment.plan.graph)
        packed = message.pack(experiment)
        with self._lock:
            self._require(experiment.plan)
            weights = checkpoint or self._assistant.values_of(experiment, module)
            launch, release = self._taking(experiment, packed, weights, checkpoint)
            try:
                directory = files.new_directory(self.directory, experiment)
                once_more = partial(again, weakref.ref(self), packed)
                run = Run(experiment, directory, launch, release, once_more)
            except BaseException:
                release()
                raise
            self._runs = [*(run for run in self._runs if not run.is_done), run]
        if curvature is not None and (doubt := stability.advice(experiment, curvature)):
            run.notes.append(doubt)
            warnings.warn(doubt, stacklevel=2)
        return run

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
        task = "workbench.train.curvature:measure_curvature"
        start = checkpoint_of(resume, experiment.plan.graph)
        found = self.call(task, experiment, module=module, resume=start, batches=batches)
        measured: Curvature = found[0]
        return measured

    def _taking(
        self, experiment: Experiment, packed: bytes, weights: Path | None, resume: Path | None
    ) -> tuple[Launch, Release]:
        """Engines for a run: what starts it on them, and what gives them back."""
        holder = f"a run of {experiment.plan.graph.source.name}"
        lease = self._dispatch.take(experiment.plan, holder)
        beginning = Beginning(self.task, lease.places, packed, weights, resume)
        return partial(self._begin, beginning), partial(self._dispatch.leases.give_back, lease)

    def _begin(self, beginning: Beginning, run: Run) -> Job | None:
        """On the run's thread; as a method, it keeps this cluster until the run has ended."""
        return beginning(self._engines, self._assistant, self._dispatch, run)

    def resuming(self, run: Run, packed: bytes) -> tuple[Launch, Release]:
        """Engines for `run.resume()`: what starts it on them, and what gives them back."""
        checkpoint = checkpoint_of(run, run.experiment.plan.graph)
        with self._lock:
            self._require(run.experiment.plan)
            taken = self._taking(run.experiment, packed, checkpoint, checkpoint)
            self._runs = [*(other for other in self._runs if other is not run), run]
        return taken

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
    ) -> Verification:
        """Holds the split model against the unsplit one, with the same weights and data.

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
            return verifying.carry_out(experiment, module, places, self._assistant, self._dispatch)

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

        Raises:
            TypeError: something else than graphs and plans.
            ValueError: plans for different numbers of ranks, no rows, or no time.
            ClusterError: a plan needs more engines than are here, or free.
            RunError: a rank failed.
        """
        counts = calibrate.rows_of(rows)
        if not 0 < within_s < float("inf"):
            raise ValueError(f"within_s must be a positive number of seconds, got {within_s!r}")
        plans = calibrate.plans_of(what, len(self))
        wish = calibrate.Wish(counts, precision, optimizer, data, within_s)
        with self._taken(plans[0], "a calibration") as places:
            devices = [self.devices[place] for place in places]
            calibration = calibrate.Calibration(
                places, devices, self.hosts, self._assistant, self._dispatch
            )
            return calibration.carry_out(plans, wish, module, fresh=fresh)

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
            ExperimentError: there is no such algorithm or codec, or they do not go together.
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
            return complete(self._dispatch.start(task, packed, places, shared))

    def stop(self) -> None:
        """Stops what runs, then ends all engines. May be called again."""
        for run in self._runs:
            run.stop()
        for run in self._runs:
            run.join(STOP_RUNS_WITHIN_S)
        self._end()

    def restart(self) -> None:
        """Stops what runs, ends all engines and starts new ones."""
        self.stop()
        self._start()

    @property
    def is_stopped(self) -> bool:
        """Whether its engines were ended."""
        return not self._end.alive

    @property
    def dead(self) -> tuple[int, ...]:
        """Engines whose process ended by itself; the next run replaces them."""
        return tuple(i for i in range(len(self)) if self._engines.death(i))

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each engine."""
        return tuple(self._engines[i].pid for i in range(len(self)))

    @property
    def occupied(self) -> dict[int, str]:
        """For each engine in use, what uses it."""
        return self._dispatch.leases.busy

    @property
    def sent(self) -> Ledger:
        """Messages and bytes that went to engines so far."""
        return self._engines.sent

    @property
    def received(self) -> Ledger:
        """Messages and bytes that came from engines so far."""
        return self._engines.received

    def __len__(self) -> int:
        return len(self.devices)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return report.cluster_line(self)

    def _repr_html_(self) -> str:
        return report.cluster_html(self)

    def _require(self, plan: Plan) -> None:
        """Raises ClusterError unless this cluster could run the plan."""
        if self.is_stopped:
            raise ClusterError("this cluster was stopped; make a new one, or cluster.restart()")
        self._dispatch.require(plan)

    @contextmanager
    def _taken(self, plan: Plan, holder: str) -> Iterator[tuple[int, ...]]:
        self._require(plan)
        with self._dispatch.taken(plan, holder) as places:
            yield places


def _end(engines: Engines, ground: Ground) -> None:
    try:
        engines.stop()
    finally:
        ground.leave()
