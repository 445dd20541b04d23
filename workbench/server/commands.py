"""What people ask of the job server, carried out; each of it says the same twice as once."""

from collections.abc import Callable

from workbench.server.job import QUEUED, note_end
from workbench.server.outcome import REQUESTS, becomes
from workbench.store.errors import ClusterError, StoreError
from workbench.store.record import ACTIVE, ENDED, CommandRecord, JobRecord, JobState
from workbench.store.store import Store

_WAITING: tuple[JobState, ...] = ("queued", "paused")
KEEPERS = frozenset(("shutdown",))
"""Commands that the supervisor carries out."""


class Commands:
    """Carries out the commands that are in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, Callable[[CommandRecord], None]] = {
            "stop": self._end,
            "pause": self._end,
            "cancel": self._end,
            "release": self._release,
            "resume": self._resume,
            "priority": self._set_priority,
            "expect_paused": self._expect_paused,
        }

    def carry_out(self) -> None:
        """Carries out all that wait."""
        for command in self._store.commands():
            if command.kind in KEEPERS:
                continue
            try:
                self._handler(command.kind)(command)
            except (ClusterError, KeyError, TypeError, ValueError) as error:
                self._store.answer_command(command.id, str(error) or type(error).__name__)
            else:
                self._store.answer_command(command.id)

    def _handler(self, kind: str) -> Callable[[CommandRecord], None]:
        if kind not in self._known:
            raise ClusterError(f"no command {kind!r}; there are {', '.join(sorted(self._known))}")
        return self._known[kind]

    def request(self, job: JobRecord, requested: str) -> bool:
        """Has a job that holds engines end its attempt for a reason; whether that is new."""
        if REQUESTS.index(job.requested) >= REQUESTS.index(requested):
            return False
        return self._store.update(job.id, only_in=ACTIVE, requested=requested, state="stopping")

    def _end(self, command: CommandRecord) -> None:
        job = self._job(command)
        verdict = becomes(command.kind)
        if command.kind == "pause" and job.kind != "train":
            raise ClusterError(f"{job.name} cannot be paused: only training leaves checkpoints")
        if command.kind == "pause" and job.state in ENDED:
            raise ClusterError(f"{job.name} has ended ({job.state}): there is nothing to pause")
        if job.state in _WAITING:
            note_end(self._store, job, verdict)
        if self._store.release(job.id, verdict.state, only_in=_WAITING, reason=verdict.reason):
            return
        self.request(self._store.job(job.id), command.kind)

    def _release(self, command: CommandRecord) -> None:
        job = self._job(command)
        if job.kind != "lease":
            raise ClusterError(f"{job.name} is no lease, and so is not released: stop it")
        if not self._store.release(job.id, "finished", only_in=QUEUED, reason="released"):
            self.request(self._store.job(job.id), "stop")

    def _resume(self, command: CommandRecord) -> None:
        job = self._job(command)
        if job.kind != "train":
            raise ClusterError(f"{job.name} cannot be resumed: only training can")
        if job.state == "finished":
            raise ClusterError(
                f"all steps of {job.name} are done; for more of them, "
                "cluster.train(run.experiment.replace(steps=...), resume=run)"
            )
        fresh = {"requested": "", "error": None, "ended_at": None, "reason": ""}
        if job.state in ACTIVE:
            # One that is about to be paused waits for engines then, instead of for people.
            if job.requested in ("pause", "stop"):
                self._store.update(job.id, only_in=ACTIVE, requested="preempt")
            return
        again = (*ENDED - {"finished"}, *_WAITING)
        self._store.update(job.id, only_in=again, state="queued", **fresh)

    def _set_priority(self, command: CommandRecord) -> None:
        self._store.update(self._job(command).id, priority=int(command.payload["priority"]))

    def _expect_paused(self, command: CommandRecord) -> None:
        """An engine was stopped on purpose, or goes on: nobody takes it for one that hangs."""
        index, paused = int(command.payload["engine"]), bool(command.payload.get("paused", True))
        engine = next((each for each in self._store.engines() if each.index == index), None)
        if engine is None:
            raise ClusterError(f"there is no engine {index}")
        if paused and engine.state in ("idle", "busy"):
            self._store.set_engine(index, state="paused")
        elif not paused and engine.state == "paused":
            self._store.set_engine(index, state="idle" if engine.job is None else "busy")

    def _job(self, command: CommandRecord) -> JobRecord:
        if command.job is None:
            raise ClusterError(f"a command {command.kind!r} says of which job")
        try:
            return self._store.job(command.job)
        except StoreError:
            raise ClusterError(f"there is no job {command.job}") from None
