"""Owns the processes of a cluster: starts them, sees them end, puts others in their place.

Which process is which engine is written in the store, by process id. In the place of an engine that
ended, another is started: forked where there is a template (`template.py`).
"""

import asyncio
import logging
import math
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from workbench.hosts.processes import reap
from workbench.hosts.remote.gathering import AllocationLimit, Gathering
from workbench.store.cluster_spec import FILE, ClusterSpec, Launch, identity
from workbench.store.cluster_store import remove
from workbench.store.errors import ClusterError, StoreError
from workbench.store.process import RENEW_EVERY_S, SUPERVISOR, ProcessIdentity, renew
from workbench.store.record import EngineRecord, JobState
from workbench.store.store import Store
from workbench.supervisor.cluster_processes import ClusterProcesses, Ended
from workbench.supervisor.kept_process import Backoff, KeptProcess, RestartPolicy
from workbench.supervisor.starting import MEETING, shorten

# A job that is paused waits for people, however long; it goes on when somebody attaches again.
UNFINISHED: tuple[JobState, ...] = ("queued", "starting", "running", "stopping")


class Lifetime:
    """A cluster stays while somebody is attached to it or a job is unfinished, and a while more."""

    def __init__(self, spec: ClusterSpec, store: Store, now: float) -> None:
        self._spec, self._store, self._needed_at = spec, store, now

    def is_over(self, now: float) -> str:
        """Why the cluster shall end, for people; "" where it shall stay."""
        bound_to = self._spec.bound_to
        if bound_to is not None and not bound_to.is_alive:
            return f"process {bound_to.pid} has ended, and the cluster is bound to it"
        if self._is_needed():
            self._needed_at = now
        if now - self._needed_at > self._spec.linger_s:
            return f"nobody was attached, and nothing to be done, for {self._spec.linger_s:g} s"
        return ""

    def _is_needed(self) -> bool:
        owners = self._store.owners()
        for owner in owners:
            if not owner.is_alive:
                self._store.detach(owner)
        if any(owner.is_alive for owner in owners):
            return True
        return bool(self._store.jobs(states=UNFINISHED))


AGAIN_S = 1.0
POLL_EVERY_S = 0.25  # at the store; of a child's end the kernel tells at once
ASSISTANT_AFTER_S = 15.0  # at the latest
PATIENCE = RestartPolicy(lasting_s=10.0, first_s=0.5, longest_s=30.0, most=6)

log = logging.getLogger(__name__)


class Supervisor:
    """Keeps a cluster until it is asked to end it, or nobody needs it any more."""

    def __init__(self, folder: Path, spec: ClusterSpec, store: Store) -> None:
        self._folder, self._spec, self._store = folder, spec, store
        self._news = asyncio.Event()
        self._ended: list[Ended] = []  # engines whose end nobody was told of
        self._controllers_ended: list[Ended] = []
        self._gathering: Gathering | None = None
        self._equip(spec)
        self._due: dict[int, float] = {}  # engines to start, and when
        self._controller_series = Backoff(replace(PATIENCE, most=None))
        self._controller_due = math.inf
        self._began_at = self._renewed_at = time.monotonic()
        self._lifetime = Lifetime(spec, store, self._began_at)
        self._ends = ""  # why it does
        self._removes: bool | None = None  # all that there is; None: unless a job was ever given

    async def run(self) -> None:
        """Returns when all has ended."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._end, "it was asked to by SIGTERM")
        try:
            if self._spec.launch is not None:
                await self._gather(self._spec.launch)
            if not self._ends:
                await self._begin()
                await self._go_on()
        finally:
            self._clear()

    def _equip(self, spec: ClusterSpec, ports: Sequence[int] = ()) -> None:
        """Makes what depends on which engines there are, and where.

        Args:
            spec: the cluster, as far as it is known.
            ports: ports for the store where ranks meet, and for the controller; none: any.
        """
        self._spec = spec
        told = (self._engine_ended, self._controller_ended)
        self._processes = ClusterProcesses(self._folder, spec, *told, ports[1:])
        self._server = KeptProcess("the job server", self._processes.start_server)
        start = partial(self._processes.start_rendezvous, ports[0] if ports else 0)
        self._rendezvous = KeptProcess("the store where ranks meet", start)
        self._series = [Backoff(PATIENCE) for _ in spec.devices]
        notice_s = 0.0 if spec.launch is None else spec.launch.notice_s
        self._limit = AllocationLimit(self._store, spec.ends_at, notice_s)

    async def _gather(self, launch: Launch) -> None:
        """Has hosts come; returns when all are there, or when the cluster is to end."""
        self._removes = False  # why they did not come is in the log
        try:
            self._gathering = Gathering(self._folder, launch)
            gathered = asyncio.create_task(self._gathering.gather(self._spec))
            while not gathered.done():
                await asyncio.wait((gathered,), timeout=POLL_EVERY_S)
                self._obey()
                self._end(self._lifetime.is_over(time.monotonic()))
                if self._ends:
                    gathered.cancel()
                    return
            spec = gathered.result()
        except ClusterError as error:
            self._end(str(error))  # which is in the log before anybody can see that we have ended
            return
        self._removes = None
        spec.save(self._folder)
        self._equip(spec, self._gathering.ports)
        self._limit.announce()

    async def _begin(self) -> None:
        # What an earlier supervisor has left is of no use to anybody.
        reap(identity(self._folder))
        shutil.rmtree(self._folder / "profile", ignore_errors=True)
        self._store.set_meta(MEETING, None)
        for index in range(len(self._spec.devices)):
            self._describe(index)
        await self._start_controller()
        self._processes.make_template(self._news.set)
        *engines, assistant = range(len(self._spec.devices))
        self._due |= dict.fromkeys(engines, self._began_at)
        # Not with the others: those are waited for.
        self._due[assistant] = self._began_at + ASSISTANT_AFTER_S

    async def _go_on(self) -> None:
        while not self._ends:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), POLL_EVERY_S)
            self._news.clear()
            await self._keep(time.monotonic())

    async def _keep(self, now: float) -> None:
        """One look at everything."""
        try:
            if said := self._server.poll(now):
                self._tell(said, "server_died")
            if self._processes.are_ready and (said := self._rendezvous.poll(now)):
                self._tell(said, "rendezvous_died")
            while self._controllers_ended:
                self._note_controller(self._controllers_ended[0], now)
                del self._controllers_ended[0]
            if now >= self._controller_due:
                await self._start_controller()
            while self._ended:
                self._note(self._ended[0], now)
                del self._ended[0]
            if self._store.changed():
                self._obey()
                self._hasten(now)
            self._end(self._lifetime.is_over(now))
            self._limit.look(time.time())
            if now - self._renewed_at >= RENEW_EVERY_S:
                self._renewed_at = now
                renew(self._folder / SUPERVISOR)
                shorten(self._folder)
            if self._gathering is not None and self._gathering.is_over:
                self._end("all its hosts have gone")
            due = [index for index, when in self._due.items() if now >= when]
            for index in due if self._processes.are_ready else ():
                self._due[index] = now + AGAIN_S
                if await self._start(index):
                    del self._due[index]
        except Exception as error:  # a full disk, no room for a process: the next look may do
            level = logging.WARNING if isinstance(error, StoreError | OSError) else logging.ERROR
            log.log(level, "%s", error, exc_info=level == logging.ERROR)

    def _obey(self) -> None:
        for command in self._store.commands():
            if command.kind == "shutdown":
                self._removes = bool(command.payload.get("remove", True))
                self._store.answer_command(command.id)
                self._end("it was asked to")

    def _hasten(self, now: float) -> None:
        """Starts the assistant as soon as no other engine is waited for."""
        assistant = self._spec.num_engines
        if assistant in self._due and not self._series[assistant].has_begun:
            engines = self._store.engines()[:assistant]
            if not any(engine.state == "starting" for engine in engines):
                self._due[assistant] = now

    async def _start_controller(self) -> None:
        """A controller, also in another's place: engines and clients see no difference."""
        self._controller_due = time.monotonic() + AGAIN_S  # where it fails
        await self._processes.start_controller()
        self._controller_due = math.inf
        self._controller_series.began(time.monotonic())

    async def _start(self, index: int) -> bool:
        """Starts an engine; whether it is known as what it is."""
        pid = await self._processes.start_engine(index)
        self._series[index].began(time.monotonic())
        try:
            process = ProcessIdentity.of(pid)
        except ProcessLookupError:  # it has ended, and was collected, already
            self._describe(index)
            ended = await self._ending_of(pid)
            self._replace(self._store.engines()[index], ended, time.monotonic())
            return False
        try:
            self._describe(index, process)
        except StoreError:
            process.send(signal.SIGKILL)  # nobody would know that it is there
            raise
        return True

    async def _ending_of(self, pid: int) -> Ended:
        """How a process has ended: who has collected it says so, a little later perhaps."""
        until = time.monotonic() + AGAIN_S
        while time.monotonic() < until:
            for ended in self._ended:
                if ended.pid == pid:
                    self._ended.remove(ended)
                    return ended
            await asyncio.sleep(0.01)
        return Ended(pid, "ended", "")

    def _describe(self, index: int, process: ProcessIdentity | None = None) -> None:
        device = self._spec.devices[index]
        self._store.set_engine(
            index,
            state="starting",
            process=process,
            engine_id=None,
            name=device.name,
            kind=device.kind,
            memory_bytes=device.memory_bytes,
            is_assistant=index == self._spec.num_engines,
        )

    def _engine_ended(self, ended: Ended) -> None:
        self._ended.append(ended)
        self._news.set()

    def _controller_ended(self, ended: Ended) -> None:
        self._controllers_ended.append(ended)
        self._news.set()

    def _note_controller(self, ended: Ended, now: float) -> None:
        self._tell(f"the controller (process {ended.pid}) {ended.how}", "controller_died")
        log.warning("the last that it wrote:\n%s", ended.said)
        self._controller_due = self._controller_series.ended(now) or now

    def _note(self, ended: Ended, now: float) -> None:
        for engine in self._store.engines():
            if engine.pid == ended.pid and engine.state != "dead":
                self._replace(engine, ended, now)

    def _replace(self, engine: EngineRecord, ended: Ended, now: float) -> None:
        text = f"engine {engine.index} (process {ended.pid}) {ended.how}"
        self._store.set_engine(engine.index, state="dead", death=ended.how)
        due = self._series[engine.index].ended(now, had_started=engine.state != "starting")
        if due is None:
            self._due.pop(engine.index, None)
            self._tell(
                f"{text}, as did those before it; no other is started in its place. The last "
                f"that it wrote:\n{ended.said}",
                "engine_given_up",
                engine.index,
            )
        else:
            self._tell(f"{text}; another is started in its place", "engine_died", engine.index)
            self._due[engine.index] = due

    def _tell(self, text: str, kind: str, engine: int | None = None) -> None:
        log.warning("%s", text)
        with suppress(StoreError):
            self._store.event(text, kind=kind, level="error", engine=engine)

    def _end(self, why: str) -> None:
        self._ends = self._ends or why
        if why:
            self._news.set()

    def _clear(self) -> None:
        """Ends all processes, and removes what only they needed."""
        log.warning("this supervisor ends: %s", self._ends or "it failed")
        self._server.kill()
        self._rendezvous.kill()
        self._processes.kill()
        if self._gathering is not None:
            self._gathering.close()
        reap(identity(self._folder))
        for name in ("profile", "ipython", "relays"):
            shutil.rmtree(self._folder / name, ignore_errors=True)
        with suppress(StoreError):
            if self._removes is None:
                self._removes = not self._store.jobs()
        self._store.close()
        if self._removes:
            (self._folder / FILE).unlink(missing_ok=True)  # first: from now on it is no cluster's
            remove(self._folder)
