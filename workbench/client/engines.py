"""The engines of a cluster as processes: begun, found again, broken on purpose, and ended."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, Self

from workbench import supervisor
from workbench.client.calibration.cache import KeptMachines
from workbench.client.connection import ClusterLink
from workbench.client.faults import Faults
from workbench.client.lifecycle import SECONDS, UNFINISHED, cluster_spec, end, make, sweep, validate
from workbench.hosts.emulated.hosts import Hosts
from workbench.hosts.processes import until
from workbench.plan.plans.plan import Plan
from workbench.store import registry
from workbench.store.cluster_spec import ClusterSpec, EngineDevice, Launch, Profile
from workbench.store.cluster_store import rebuild
from workbench.store.errors import ClusterError
from workbench.store.process import LEASE_S
from workbench.store.record import EngineRecord, Tally

STOP_RUNS_WITHIN_S = 10.0
TICK_S = 0.05


class Follower(Protocol):
    """Something that reads from a cluster until a job of it has ended; a run does."""

    def join(self, timeout: float) -> bool:
        """Waits so many seconds for it to be done; whether it is."""


class Engines(Faults):
    """Engines that a supervisor owns; see `Cluster`, which trains and measures on them.

    Args:
        n: the number of engines.
        hosts: emulated hosts to run on.
        profile: an IPython profile, or a `Profile`, which says how engines get to other hosts.
        directory: the folder for runs, each of which has a folder of its own.
        timeout: seconds that a rank waits for the others before it reports who is missing.
        lease: seconds after which a process that was stopped by a signal is ended, and a host that
            does not answer counts as lost; what takes less is a hiccup.
        suspicion: seconds after which a stopped process is told of in the events.
        name: the name to attach by; None: one that no other cluster has.
        linger_s: seconds that the engines stay when nobody is attached and nothing goes on.

    Raises:
        ValueError: `n` is no positive integer, or less than there are emulated hosts; or the name
            is none that folders can have; or both `hosts` and `profile` were given.
        HostsError: the emulated hosts could not be made.
        ClusterError: the engines did not start; the text holds what they wrote. Or there is a
            cluster of this name, or no such profile.
    """

    task = "train"
    _launch: Launch | None = None

    def __init__(
        self,
        n: int,
        *,
        hosts: Hosts | None = None,
        profile: str | Profile | None = None,
        directory: str | Path = "runs",
        timeout: float = 30.0,
        lease: float = 20.0,
        suspicion: float = 1.0,
        name: str | None = None,
        linger_s: float = 60.0,
    ) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"a cluster has a positive number of engines, got {n!r}")
        for what, seconds in (("timeout", timeout), ("lease", lease), ("suspicion", suspicion)):
            if not seconds > 0:
                raise ValueError(f"{what} must be a positive number of seconds, got {seconds!r}")
        if not linger_s >= 0:
            raise ValueError(f"linger_s must be a number of seconds, got {linger_s!r}")
        validate(n, hosts, profile)
        self.profile = Profile(profile) if isinstance(profile, str) else profile
        self._n, self.hosts = n, hosts
        self._seconds = dict(
            timeout_s=timeout, lease_s=lease, suspicion_s=suspicion, linger_s=linger_s
        )
        self.directory = Path(directory).resolve()
        own_name = registry.new_name() if name is None else name
        self.folder = registry.folder_for(self.directory, own_name)
        self._start(is_new=True)

    @classmethod
    def attach(cls, name: str | Path, *, trust: bool = False) -> Self:
        """A cluster that was started before, from whichever notebook, with all that it has done.

        Engines that have ended meanwhile are started again, and their jobs go on from their
        newest checkpoints.

        Args:
            name: the cluster's name; or its folder, as a `Path`, or as text with a "/" in it.
            trust: whether to execute what is in a folder of which this account does not know that
                it has started the cluster: one that was moved, or is a copy.

        Raises:
            ClusterError: there is none, or its engines did not start; the text says why. Or what is
                in its folder may be somebody else's.
        """
        self = cls.__new__(cls)
        self.folder = registry.find(name)
        registry.require_trusted(self.folder, trust=trust)
        self.directory, self.hosts, self.profile = self.folder.parent, None, None
        spec = ClusterSpec.load(self.folder)
        self._n = spec.num_engines
        self._seconds = {name: getattr(spec, name) for name in SECONDS}
        keeper = supervisor.supervisor_of(self.folder)
        if keeper is None:
            rebuild(self.folder)
            supervisor.start(self.folder)
        elif not keeper.is_near:
            raise ClusterError(
                f"cluster {registry.name_of(self.folder)!r} is kept on another host, or was until "
                f"a moment ago: attach to it there, or here {LEASE_S:g} s after that has ended"
            )
        try:
            self._adopt(spec, _nothing)
        except ClusterError:
            if keeper is None or supervisor.supervisor_of(self.folder) is not None:
                raise
            self._end.detach()
            supervisor.start(self.folder)  # the other one was about to end
            self._adopt(spec, _nothing)
        return self

    def _start(self, *, is_new: bool) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        sweep(self.directory)
        launch = self._launch if self.profile is None else self.profile.launch(self._n)
        if is_new:
            make(self.folder)
        elif supervisor.supervisor_of(self.folder) is None:
            rebuild(self.folder)
        leave = _nothing
        try:
            spec, leave = cluster_spec(self._n, self.hosts, launch, **self._seconds)
            supervisor.start(self.folder, spec)
            registry.enter(self.folder)
            self._adopt(spec, leave)
        except BaseException:
            end(self.folder, at_once=True, keep_folder=not is_new)
            leave()
            raise
        if self.hosts is not None:
            self.hosts.attach(self)

    @property
    def are_elsewhere(self) -> bool:
        """Whether engines run on other hosts, which may see other files."""
        return self._launch is not None

    def _adopt(self, spec: ClusterSpec, leave: Callable[[], None]) -> None:
        """Makes this object one of a cluster that has a supervisor."""
        self.link, self._launch = ClusterLink(self.folder), spec.launch
        self.machines = KeptMachines()
        # Also when the last reference goes, and before the interpreter does.
        self._end = weakref.finalize(self, _leave, self.link, leave, self.hosts is not None)
        spec = self.link.wait(spec)
        self.devices: tuple[EngineDevice, ...] = spec.devices[: self._n]
        self.ends_at = spec.ends_at
        self.followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        relayed = [bool(spec.launch and site.enter) for site in spec.sites]
        super().__init__(self.link.process_of, self.link.expect, lambda engine: relayed[engine])

    @property
    def name(self) -> str:
        """The name to attach by."""
        return registry.name_of(self.folder)

    def stop(self) -> None:
        """Stops what runs, then ends all engines, and forgets its jobs. May be called again."""
        self._stop_runs()
        self._end_with(keep_folder=False)

    def restart(self) -> None:
        """Stops what runs, ends all engines and starts new ones; jobs stay known."""
        self._stop_runs()
        self._end_with(keep_folder=True)
        self._start(is_new=False)

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
        for follower in list(self.followers):
            follower.join(STOP_RUNS_WITHIN_S)

    @property
    def is_stopped(self) -> bool:
        """Whether its engines were ended, by this object."""
        return not self._end.alive

    @property
    def dead(self) -> tuple[int, ...]:
        """Engines whose process has ended and is not replaced yet."""
        return tuple(engine.index for engine in self._records() if engine.state == "dead")

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each engine; 0 for one that is being started."""
        return tuple(engine.pid or 0 for engine in self._records())

    @property
    def occupied(self) -> dict[int, str]:
        """For each engine in use, what uses it."""
        return self.link.holders(self._n)

    @property
    def sent(self) -> Tally:
        """Messages and bytes that went to engines so far."""
        return self.link.store.ledger()["sent"]

    @property
    def received(self) -> Tally:
        """Messages and bytes that came from engines so far."""
        return self.link.store.ledger()["received"]

    def require(self, plan: Plan) -> None:
        """Checks that these engines could run a plan.

        Raises:
            ClusterError: the cluster was stopped, has ended, or has too few engines.
        """
        if self.is_stopped:
            raise ClusterError("this cluster was stopped; make a new one, or cluster.restart()")
        self.link.require()
        if plan.world_size > self._n:
            raise ClusterError(
                f"the plan is for {plan.world_size} ranks, but this cluster has "
                f"{self._n} engines: start Cluster({plan.world_size}), or make a "
                f"plan with world_size={self._n}"
            )

    def __len__(self) -> int:
        return self._n

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _records(self) -> tuple[EngineRecord, ...]:
        """What the store says of the engines that take ranks."""
        return self.link.store.engines()[: self._n]


def _leave(link: ClusterLink, leave: Callable[[], None], is_bound: bool) -> None:
    """What becomes of a cluster that nobody here refers to any more."""
    try:
        link.end() if is_bound else link.leave()
    finally:
        leave()


def _nothing() -> None:
    pass
