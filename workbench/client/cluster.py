"""The engines of this host, of other ones, or of emulated ones, as one object in a notebook."""

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self

from torch import nn

from workbench import supervisor as supervisor
from workbench.client import report
from workbench.client.assistant import Assistant
from workbench.client.connection import Link
from workbench.client.ending import UNFINISHED, end, sweep
from workbench.client.engine_placement import cluster_spec, require_one
from workbench.client.faults import Faults
from workbench.client.jobs.jobs import Jobs
from workbench.client.leases import Dispatch, holders
from workbench.client.measurements import Measurements
from workbench.client.ranks import Ranks, open_ranks, trial
from workbench.client.run.remote import RemoteJob
from workbench.client.run.resume import again, checkpoint_of
from workbench.client.run.run import Run
from workbench.client.run.submitting import Submitter, Terms
from workbench.hosts.emulated.hosts import Hosts
from workbench.hosts.processes import until
from workbench.plan import stability
from workbench.plan.experiment import Experiment
from workbench.plan.plan import Plan
from workbench.plan.stability import Curvature
from workbench.store import message, registry
from workbench.store import run_folder as files
from workbench.store.cluster_spec import FILE, Spec
from workbench.store.device import Device
from workbench.store.errors import ClusterError
from workbench.store.profile import Launch, Profile
from workbench.store.record import EngineRecord, JobRecord, Tally
from workbench.train.reshard.requests import RunRequests

STOP_RUNS_WITHIN_S = 10.0
TICK_S = 0.05


class Cluster(Measurements, Faults):
    """Engines on this host or others, each on a GPU where there are any, else on its own cores.

    Ready when it is made. A process of its own keeps the engines, and a job server gives them to
    runs, so that runs go on when this process ends: `Cluster.attach` finds them again. Without a
    run that goes on, and with no other notebook attached, the cluster ends with this process, or
    when it is no longer referred to; and in any case with `stop()`, or at the end of a `with`
    block.

    Args:
        n: number of engines.
        hosts: emulated hosts to run on, each with as many engines as the others, give or take
            one: with 4 engines on 2 hosts, 0 and 1 are on the first. Where they are not there
            yet, they are started now and end with the cluster. They never outlive this process,
            and nor does a cluster on them.
        profile: the IPython profile, by name or folder, whose `ipcluster_config.py` says how
            engines get to other hosts (SSH, Slurm, MPI, ...), or a `Profile`, which says more.
            `directory` has to be on a file system that all of them share.
        directory: where runs keep their files, each in a folder of its own.
        timeout: seconds that a rank waits for the others before it reports who is missing.
        name: to attach by; None: one that no other cluster has.
        linger_s: seconds that the engines stay when nobody is attached and nothing goes on.

    Attributes:
        devices: what each engine computes on.
        hosts: as given.
        profile: as given; None also where the cluster was attached to.
        ends_at: when a batch system takes the hosts away, in seconds since the epoch; None: never,
            as far as is known. Runs are paused some time before, with a checkpoint.
        directory: as given, absolute.
        folder: of the cluster itself.
        link: to its job server.
        task: "module:function" that each rank of a run calls.

    Raises:
        ValueError: `n` is no positive integer, or less than there are emulated hosts; or a name
            that folders cannot have; or both `hosts` and `profile`.
        HostsError: the emulated hosts could not be made.
        ClusterError: the engines did not start; the text holds what they wrote. Or there is a
            cluster of this name, or no such profile.
    """

    task = "workbench.train.loop.session:train"
    _launch: Launch | None = None

    def __init__(
        self,
        n: int,
        *,
        hosts: Hosts | None = None,
        profile: str | Profile | None = None,
        directory: str | Path = "runs",
        timeout: float = 30.0,
        name: str | None = None,
        linger_s: float = 60.0,
    ) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"a cluster has a positive number of engines, got {n!r}")
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
        if not linger_s >= 0:
            raise ValueError(f"linger_s must be a number of seconds, got {linger_s!r}")
        require_one(n, hosts, profile)
        self.profile = Profile(profile) if isinstance(profile, str) else profile
        self._n, self.hosts, self._timeout, self._linger_s = n, hosts, timeout, linger_s
        self.directory = Path(directory).resolve()
        own_name = registry.new_name() if name is None else name
        self.folder = registry.folder_for(self.directory, own_name)
        if (self.folder / FILE).exists():
            raise ClusterError(
                f"there is a cluster {name!r} in {self.directory}: Cluster.attach({name!r}) goes "
                "on with it"
            )
        self._start()

    @classmethod
    def attach(cls, name: str | Path) -> Self:
        """A cluster that was started before, by whomever, with all that it has done.

        Engines that have ended meanwhile are started again, and their jobs go on from their
        newest checkpoints.

        Args:
            name: of the cluster, or its folder.

        Raises:
            ClusterError: there is none, or its engines did not start; the text says why.
        """
        self = cls.__new__(cls)
        self.folder = registry.find(name)
        self.directory, self.hosts, self.profile = self.folder.parent, None, None
        spec = Spec.load(self.folder)
        self._n, self._timeout, self._linger_s = spec.num_engines, spec.timeout_s, spec.linger_s
        if supervisor.supervisor_of(self.folder) is None:
            supervisor.start(self.folder)
        self._adopt(spec, _nothing)
        return self

    def _start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        sweep(self.directory)
        launch = self._launch if self.profile is None else self.profile.launch(self._n)
        spec, leave = cluster_spec(self._n, self.hosts, launch, self._timeout, self._linger_s)
        try:
            supervisor.start(self.folder, spec)
            registry.enter(self.folder)
            self._adopt(spec, leave)
        except BaseException:
            end(self.folder, at_once=True)
            leave()
            raise
        if self.hosts is not None:
            self.hosts.attach(self)

    def _adopt(self, spec: Spec, leave: Callable[[], None]) -> None:
        """Makes this object one of a cluster that has a supervisor."""
        self.link, self._launch = Link(self.folder), spec.launch
        # Also when the last reference goes, and before the interpreter does.
        self._end = weakref.finalize(self, _leave, self.link, leave, self.hosts is not None)
        spec = self.link.wait(spec)
        self.devices: tuple[Device, ...] = spec.devices[: self._n]
        self.ends_at = spec.ends_at
        self._dispatch = Dispatch(self.link, self._n)
        self._assistant = Assistant(self._dispatch, self._n, self.folder)
        self._submitter = Submitter(self.devices, self.hosts, self.directory, self._assistant)
        self._runs: weakref.WeakSet[Run] = weakref.WeakSet()
        relayed = [bool(spec.launch and site.enter) for site in spec.sites]
        super().__init__(self.link.pid_of, self.link.expect, lambda engine: relayed[engine])

    @property
    def name(self) -> str:
        """To attach by."""
        return registry.name_of(self.folder)

    def train(
        self,
        experiment: Experiment,
        *,
        resume: str | Path | Run | None = None,
        module: nn.Module | None = None,
        curvature: Curvature | None = None,
        priority: int = 0,
    ) -> Run:
        """Submits an experiment and returns at once; it waits where too few engines are free.

        Args:
            experiment: what to run.
            resume: a checkpoint under any plan of this model, or a run (or its folder) that
                left one, to go on from.
            module: the user's own module, where the model was traced from one: its values are
                the initial weights. Not needed with `resume`.
            curvature: as `curvature` has measured it: then a warning, and a note on the run, say
                if a pipelined experiment is likely to diverge. Without it nothing is claimed.
            priority: higher goes first.

        Raises:
            ClusterError: the plan needs more engines than are here, or more memory than they have.
            CheckpointError: what to go on from is damaged, missing or of another model.
            ModelError: `module` is missing, or is another one than was traced.
            ControlMessageTooLarge: the model's own code is too large for a control message.
        """
        if not isinstance(experiment, Experiment):
            raise TypeError(f"train takes an Experiment, got {type(experiment).__name__}")
        run = self.jobs.submit(experiment, priority=priority, module=module, resume=resume)
        if curvature is not None and (doubt := stability.advice(experiment, curvature)):
            run.notes.append(doubt)
            warnings.warn(doubt, stacklevel=2)
        return run

    def ranks(
        self, plan: Plan | Experiment, *, module: nn.Module | None = None, seed: int = 0
    ) -> Ranks:
        """Opens ranks that run cells with their parts of the model in reach; see `Ranks.run`.

        They keep their engines until they are closed.

        Args:
            plan: under which the model is cut; or a whole experiment, for its optimizer and data.
            module: as in `train`.
            seed: of weights and data, with a plan.

        Raises:
            ClusterError: the plan needs more engines than are here, or free.
            ModelError: `module` is missing, or is another one than was traced.
        """
        experiment = plan if isinstance(plan, Experiment) else trial(plan, seed)
        taken = self._taken(experiment.plan, "a notebook's cells")
        return open_ranks(experiment, module, taken, self._assistant, self._dispatch, self.link)

    @property
    def jobs(self) -> Jobs:
        """All that was submitted, by whomever."""
        return Jobs(self)

    def launch(
        self,
        experiment: Experiment,
        terms: Terms,
        *,
        module: nn.Module | None = None,
        checkpoint: Path | None = None,
    ) -> Run:
        """Submits an experiment on these terms; see `jobs.submit`."""
        self._require(experiment.plan)
        request = self._submitter.request(experiment, terms, module=module, checkpoint=checkpoint)
        return self._run(experiment, Path(request.directory), self.link.submit(request))

    def follow(self, record: JobRecord) -> Run:
        """A run that follows a job which was submitted before."""
        directory = Path(record.directory)
        experiment = RunRequests(directory).in_force(message.unpack(record.packed))
        return self._run(experiment, directory, record.id)

    def resuming(self, run: Run) -> RemoteJob:
        """Has a run that has ended go on; the job to follow then."""
        self._require(run.experiment.plan)
        checkpoint = checkpoint_of(run, run.experiment.plan.graph)
        before = self._record(run)
        if before is not None:
            self.link.store.repack(before.id, message.pack(run.experiment))
            self.link.ask("resume", before.id)
            return RemoteJob(self.link, before.id, after=before.attempt, keep=self)
        request = self._submitter.request(
            run.experiment,
            Terms(task=self.task),
            checkpoint=checkpoint,
            directory=run.directory,
        )
        earlier = files.last_attempt(run.directory)
        return RemoteJob(self.link, self.link.submit(request), after=earlier, keep=self)

    def _record(self, run: Run) -> JobRecord | None:
        """What the server knows of a run; None where it is of another cluster."""
        for record in self.link.store.jobs():
            if record.id == run.id and record.directory == str(run.directory):
                return record
        return None

    def _run(self, experiment: Experiment, directory: Path, job: int) -> Run:
        # A run keeps its cluster while it goes on.
        remote = RemoteJob(self.link, job, keep=self)
        run = Run(experiment, directory, remote, partial(again, weakref.ref(self)))
        self._runs.add(run)
        return run

    def stop(self) -> None:
        """Stops what runs, then ends all engines, and forgets its jobs. May be called again."""
        self._stop_runs()
        self._end_with(keep_folder=False)

    def restart(self) -> None:
        """Stops what runs, ends all engines and starts new ones; jobs stay known."""
        self._stop_runs()
        self._end_with(keep_folder=True)
        self._start()

    def _end_with(self, *, keep_folder: bool) -> None:
        if (found := self._end.detach()) is not None:
            _over, _function, (link, leave, _bound), _keywords = found
            link.end(keep_folder=keep_folder)
            leave()

    def _stop_runs(self) -> None:
        """Has all runs of the cluster leave a checkpoint and end."""
        if self.is_stopped or not self.link.is_kept:
            return
        self.mend()
        for job in self.link.store.jobs(states=UNFINISHED):
            self.link.store.command("stop" if job.kind == "train" else "cancel", job.id)
        until(lambda: not self.link.store.jobs(states=UNFINISHED), STOP_RUNS_WITHIN_S, TICK_S)
        for run in list(self._runs):
            run.join(STOP_RUNS_WITHIN_S)

    @property
    def is_stopped(self) -> bool:
        """Whether its engines were ended, by this object."""
        return not self._end.alive

    @property
    def dead(self) -> tuple[int, ...]:
        """Engines whose process has ended and is not replaced yet."""
        return tuple(engine.index for engine in self._engines() if engine.state == "dead")

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each engine; 0 for one that is being started."""
        return tuple(engine.pid or 0 for engine in self._engines())

    @property
    def occupied(self) -> dict[int, str]:
        """For each engine in use, what uses it."""
        return holders(self.link, self._n)

    @property
    def sent(self) -> Tally:
        """Messages and bytes that went to engines so far."""
        return self.link.store.ledger()["sent"]

    @property
    def received(self) -> Tally:
        """Messages and bytes that came from engines so far."""
        return self.link.store.ledger()["received"]

    def __len__(self) -> int:
        return self._n

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return report.cluster_line(self)

    def _repr_html_(self) -> str:
        return report.cluster_html(self)

    def _engines(self) -> tuple[EngineRecord, ...]:
        """Those that take ranks."""
        return self.link.store.engines()[: self._n]

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


def _leave(link: Link, leave: Callable[[], None], is_bound: bool) -> None:
    """What becomes of a cluster that nobody here refers to any more."""
    try:
        link.end() if is_bound else link.leave()
    finally:
        leave()


def _nothing() -> None:
    pass
