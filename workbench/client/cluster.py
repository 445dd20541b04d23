"""A cluster, as one object in a notebook: what is trained, measured and verified on its engines."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
from torch import nn

from workbench.client import ranks, verifying
from workbench.client.calibration import calibrate, sum_trace
from workbench.client.calibration.sum_trace import SumTrace
from workbench.client.engines import Engines
from workbench.client.jobs import Jobs
from workbench.client.leases import lent
from workbench.client.loggers.logger import Logs
from workbench.client.ranks import Ranks
from workbench.client.run.run import Run
from workbench.client.run.submitting import Weights, module_values
from workbench.client.run.trying import try_out
from workbench.plan.collective.algorithm import Algorithm
from workbench.plan.collective.codec import AnyCodec
from workbench.plan.experiment.experiment import AnyOptimizer, Experiment
from workbench.plan.graph.graph import Graph
from workbench.plan.io.html import Markup, element, frame_of, lines, save, table
from workbench.plan.io.units import size
from workbench.plan.machine.device import Precision
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan
from workbench.train.verify.verification import Verification

if TYPE_CHECKING:
    import pandas


class Cluster(Engines):
    """Engines on this host or others, each on a GPU where there are any, else on its own cores.

    Ready when it is made. A process of its own keeps the engines, and a job server gives them to
    runs, so that runs go on when this process ends: `Cluster.attach` finds them again. Without a
    run that goes on, and with no other notebook attached, the cluster ends with this process, or
    when it is no longer referred to; and in any case with `stop()`, or at the end of a `with`
    block.

    Args:
        n: the number of engines.
        hosts: emulated hosts to run on, each with as many engines as the others, give or take one:
            with 4 engines on 2 hosts, 0 and 1 are on the first. Where they are not there yet, they
            are started now and end with the cluster. They never outlive this process, and nor does
            a cluster on them.
        profile: the IPython profile, by name or folder, whose `ipcluster_config.py` says how
            engines get to other hosts (SSH, Slurm, MPI, ...), or a `Profile`, which says more.
            `directory` has to be on a file system that all of them share.
        directory: the folder for runs, each of which has a folder of its own in it.
        timeout: seconds that a rank waits for the others before it reports who is missing.
        lease: seconds after which a process that was stopped by a signal is ended, and a host that
            does not answer counts as lost. What takes less is a hiccup, which a run outlasts while
            it is also less than `timeout`.
        suspicion: seconds after which a stopped process is told of in the events.
        name: the name to attach by; None: one that no other cluster has.
        linger_s: seconds that the engines stay when nobody is attached and nothing goes on.

    Attributes:
        devices: what each engine computes on.
        hosts: the emulated hosts, if it runs on some.
        profile: the profile, if it runs on one; None also where the cluster was attached to.
        ends_at: the time when a batch system takes the hosts away, in seconds since the epoch;
            None: never, as far as is known. Runs are paused some time before, with a checkpoint.
        directory: the folder for runs, absolute.
        folder: the cluster's own folder.
        link: the way to its store and job server.
        task: the task of a run's ranks, by its name.

    Raises:
        ValueError: `n` is no positive integer, or less than there are emulated hosts; or a name
            that folders cannot have; or both `hosts` and `profile`.
        HostsError: the emulated hosts could not be made.
        ClusterError: the engines did not start; the text holds what they wrote. Or there is a
            cluster of this name, or no such profile.
    """

    def train(
        self,
        experiment: Experiment,
        *,
        resume: str | Path | Run | None = None,
        module: nn.Module | None = None,
        weights: Weights = None,
        priority: int = 0,
        log: Logs | Sequence[Logs] | None = None,
    ) -> Run:
        """Submits an experiment and returns at once; it waits where too few engines are free.

        Args:
            experiment: what to run.
            resume: a checkpoint under any plan of this model, or a run (or its folder) that left
                one, to go on from.
            module: a module with other initial values than those of the module that was traced; it
                is needed where that happened in another process. Ignored with `resume`.
            weights: initial values instead of those: a .safetensors file, a folder of them as
                Hugging Face has it, or one of `torch.distributed.checkpoint`; or tensors by name.
            priority: higher goes first.
            log: the loggers of its steps: `wb.JSONLines(path)`, `wb.TensorBoard(folder)`,
                `wb.WandB(...)`, any function of a step (a dict of all ranks together), or a list of
                them. They run in this process, on a thread of
                their own, from what the run reports anyway, so ranks do nothing for them. Where
                this process ends, the run goes on without them; `run.log_to` tells them of all
                steps later, of a run that was attached to or read with `wb.Run.load`. One that
                raises is noted in `run.notes`, and gets no more steps.

        Raises:
            ClusterError: the plan needs more engines than are here, or more memory than they have.
            CheckpointError: what to go on from, or `weights`, is damaged, missing or of another
                model.
            ModelError: `module` is needed and missing, or is another model than was traced.
            DataError, OwnObjectError: your own data set, collate function, loss or metric fails
                when it is tried, in this process, or gives ranks something else than one process.
            OSError: the disk is full.
            ModuleNotFoundError: a logger's package is missing; the text says what to install.
        """
        if not isinstance(experiment, Experiment):
            raise TypeError(f"train takes an Experiment, got {type(experiment).__name__}")
        return self.jobs.submit(
            experiment, priority=priority, module=module, weights=weights, resume=resume, log=log
        )

    def ranks(
        self, plan: Plan | Experiment, *, module: nn.Module | None = None, seed: int = 0
    ) -> Ranks:
        """Opens ranks that run cells with their parts of the model in reach; see `Ranks.run`.

        They keep their engines until they are closed.

        Args:
            plan: the plan under which the model is cut; or a whole experiment, for its optimizer
                and data.
            module: as in `train`.
            seed: the seed of weights and data, with a plan.

        Raises:
            ClusterError: the plan needs more engines than are here, or free.
            ModelError: `module` is needed and missing, or is another model than was traced.
        """
        return ranks.open_ranks(self, plan, module, seed)

    @property
    def jobs(self) -> Jobs:
        """All that was submitted, by whomever."""
        return Jobs(self)

    def calibrate(
        self,
        *what: Graph | Plan,
        rows: int | Sequence[int] = (8, 32),
        precision: Precision = "fp32",
        optimizer: AnyOptimizer | None = None,
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
            rows: Rows of a batch on each rank. With two numbers, times at others follow by
                interpolation.
            precision: the precision of the layers.
            optimizer: the optimizer whose updates are measured in place; None: SGD with momentum.
            data: the data whose loading is measured, as in `Experiment`; None: synthetic.
            within_s: about how many seconds it may take; with less, errors are larger.
            fresh: whether to forget what was measured before.
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
        plans = calibrate.plans_of(what, len(self))
        spec = calibrate.CalibrationSpec(
            calibrate.rows_of(rows), precision, optimizer, data, within_s, module
        )
        with lent(self, plans[0], "a calibration") as lease:
            devices = [self.devices[place] for place in lease.places]
            calibration = calibrate.Calibration(lease, devices, self.hosts, spec)
            return calibration.machine(plans, fresh=fresh, machine=machine, keep=keep)

    def trace_all_reduce(
        self,
        nbytes: int,
        *,
        algorithm: Algorithm = "auto",
        codec: str | AnyCodec | None = None,
        times: int = 5,
    ) -> SumTrace:
        """Shows where an all-reduce over all engines spends its time, phase by phase.

        Args:
            nbytes: bytes on each rank, in fp32.
            algorithm: the all-reduce algorithm, which says who sums what; also one of your own.
            codec: the codec, which says what values become while they travel; also one of your own.
            times: how many all-reduces there are, an odd number; the one of median time is shown.

        Raises:
            ValueError: there is no such algorithm or codec, they do not go together, or there is
                nothing to trace.
            ClusterError: an engine is not free.
            RunError: a rank failed.
        """
        if nbytes < 4 or times % 2 == 0:
            raise ValueError(f"needs 4 bytes or more and an odd count, got {nbytes} and {times}")
        experiment = sum_trace.experiment_for(len(self), algorithm, codec)
        # It has no weights; None would have them made.
        shared = {"weights": Path(os.devnull), "numel": nbytes // 4, "times": times}
        with lent(self, experiment.plan, "a trace of an all-reduce") as lease:
            found = lease.call("trace_sums", experiment, shared)
        return sum_trace.described(experiment, nbytes, found)

    def verify(
        self,
        plan: Plan | Experiment,
        *,
        batch_size: int | None = None,
        steps: int = 5,
        precision: Literal["fp64", "fp32"] = "fp64",
        optimizer: AnyOptimizer | None = None,
        data: Any = None,
        seed: int | None = None,
        module: nn.Module | None = None,
        loss: Any = None,
        repeat: bool = True,
    ) -> Verification:
        """Holds the split model against the unsplit one, with the same weights and data.

        Compared are outputs and gradients of the first step; weights, buffers and what the
        optimizer remembers after the last; loss and metrics of a test batch in evaluation mode.
        And the split model is trained twice, which is to leave the same bits. A module of your own
        is trained beside its graph for as many steps, at its own weights and at larger ones; your
        own loss is tried by parts of rows on the outputs of every step, and on several times these,
        and the notes say in which range; a collate function is tried by halves of every batch.

        Weights that start as one constant (biases, norms) get some noise: else a bias that is
        added twice would go unseen.

        Args:
            plan: how the model is split; or an experiment, whose own batch, optimizer, data, loss
                and metrics are meant where nothing else is given.
            batch_size: rows of the whole world's batch; None: 4 for each rank.
            steps: optimizer updates before weights are compared.
            precision: "fp64" or "fp32".
            optimizer: the optimizer; None: SGD with momentum.
            data: the data, as in `Experiment`; None: synthetic.
            seed: the seed of weights, data and dropout; None: 0.
            module: as in `train`.
            loss: your own, as in `Experiment`; None: cross-entropy.
            repeat: whether to train the split model twice; without, it takes less time.

        Raises:
            ClusterError: the plan needs more engines than are here, or free.
            DataError, OwnObjectError: as in `train`.
            TraceError: the module trains otherwise than what was traced of it.
            RunError: a rank failed.
        """
        if not isinstance(plan, Plan | Experiment):
            raise TypeError(f"verify takes a Plan or an Experiment, got {type(plan).__name__}")
        experiment = verifying.experiment_for(
            plan,
            batch_size=batch_size,
            steps=steps,
            precision=precision,
            optimizer=optimizer,
            data=data,
            loss=loss,
            seed=seed,
        )
        whole = experiment.plan
        seen = None if self.are_elsewhere else try_out(experiment)
        with lent(self, whole, f"a verification of {whole.graph.source.name}") as lease:
            assistant = lease.of_assistant(self)
            return verifying.carry_out(
                experiment, module, lease, assistant, repeat=repeat, seen=seen
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
            task: "module:function"; each rank gets `config`, `experiment`, `weights` (the file of
                the initial weights) and the keywords.
            experiment: what the function is about.
            module: as in `train`.
            keywords: small further arguments.

        Returns:
            What each rank returned.

        Raises:
            ClusterError: the plan needs more engines than are here, or free.
            RunError: a rank failed.
            TypeError: `task` is no text, or `experiment` no Experiment.
        """
        for what, value, kind in (("task", task, str), ("experiment", experiment, Experiment)):
            if not isinstance(value, kind):
                raise TypeError(
                    f"call takes a task, 'module:function', and an Experiment, got "
                    f"{type(value).__name__} for {what}"
                )
        weights = keywords.get("resume") or module_values(experiment, module, self.folder)
        with lent(self, experiment.plan, f"a call of {task}") as lease:
            return lease.call(task, experiment, {"weights": weights, **keywords})

    def __repr__(self) -> str:
        if self.is_stopped:
            return f"<Cluster of {len(self)} engines: stopped>"
        kinds = dict.fromkeys(device.name for device in self.devices)
        shared = max(device.sharers for device in self.devices)
        crowded = f", up to {shared} engines on one" if shared > 1 else ""
        engines: dict[str, list[str]] = {}
        for index, device in enumerate(self.devices):
            engines.setdefault(device.host, []).append(str(index))
        hosts = (
            self.devices[0].host
            if len(engines) == 1
            else "; ".join(f"{host}: {', '.join(those)}" for host, those in engines.items())
        )
        busy, dead = len(self.occupied), len(self.dead)
        return (
            f"<Cluster of {len(self)} engines on {hosts} ({', '.join(kinds)}{crowded}): "
            f"{busy} busy" + (f", {dead} dead" if dead else "") + ">"
        )

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each engine; bytes of its process (NaN: not known here) and its device."""
        rows = []
        if not self.is_stopped:
            occupied, dead = self.occupied, self.dead
            rows = [
                {
                    "engine": index,
                    "host": device.host,
                    "pid": pid,
                    "device": str(device),
                    "threads": device.threads,
                    "resident_bytes": _resident(pid),
                    "memory_bytes": device.memory_bytes,
                    "state": "dead" if index in dead else occupied.get(index, "idle"),
                }
                for index, (device, pid) in enumerate(zip(self.devices, self.pids, strict=True))
            ]
        return frame_of(rows, _COLUMNS)

    def save(self, path: str | Path) -> None:
        """Writes its table into a file: "x.html" or "x.csv".

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path)

    def _repr_html_(self) -> Markup:
        if self.is_stopped:
            return element("div", repr(self))
        rows = [
            (*map(str, first), f"{_told(resident)} of {size(memory)}", state)
            for *first, resident, memory, state in self.to_frame().itertuples(index=False)
        ]
        head = ("engine", "host", "pid", "device", "threads", "memory", "state")
        told = [repr(self)] if self.hosts is None else [repr(self), repr(self.hosts)]
        return element("div", element("p", lines(told)), table(head, rows))


_COLUMNS = (
    *("engine", "host", "pid", "device", "threads"),
    *("resident_bytes", "memory_bytes", "state"),
)


def _resident(pid: int) -> float:
    try:
        return float(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return math.nan


def _told(num_bytes: float) -> str:
    return "-" if math.isnan(num_bytes) else size(num_bytes)
