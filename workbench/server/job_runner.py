"""Carries jobs from the engines that they were given to how they end.

Nothing is lost and nothing runs twice, wherever this process is killed, because:

1.  What was decided is in the store before anything is done about it, each time in one
    transaction: that an attempt begins and on which engines (`Store.claim`, which succeeds only
    for whoever knows the attempt before it); which processes those are; how it ended, together
    with giving the engines back (`Store.release`).
2.  Only calls follow from that, and calls may come twice: the first that reaches a rank makes the
    rank's file `alive`, which can be made once, and all others find it and do nothing. So a server
    that finds an attempt whose ranks have not all begun calls them, whether or not it was called.
3.  A call that is still on its way when its attempt is given up does nothing either: the attempt
    was withdrawn, in its folder, before anything else followed from that.
4.  Ranks tell how they go, and how they ended, by files and by their processes' ends, not to this
    process. Whoever asks later sees the same, and what we have done to a rank is written beside
    its own files before it is done. So the outcome of an attempt (`decide_outcome`) is the same
    whichever server comes to it, and however often; the first to write it down ends the attempt,
    as the store takes it only while the job still holds its engines.
5.  The next attempt has another number, so another folder and another room to meet in, and goes
    on from a checkpoint, which is whole once it has its name.

Requests are fields of the job and are written before their command is answered; commands that were
not answered are carried out again, and each says the same twice as once.
"""

import hmac
import logging
import signal
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.plan.placement.placement import RankConfig
from workbench.server.attempt import Attempt, Rank, attempt_folder
from workbench.server.engine_calls import EngineCalls
from workbench.server.fleet import Fleet
from workbench.server.job import STARTING, Work, note_beginning, note_end
from workbench.server.outcome import JobOutcome, becomes, decide_outcome
from workbench.store import messages
from workbench.store.cluster_spec import ClusterSpec, key_of
from workbench.store.errors import ClusterError, ControlMessageTooLarge
from workbench.store.messages import Answer, Assignment
from workbench.store.rank_files import RankFiles
from workbench.store.record import ACTIVE, AttemptRecord, ErrorRecord, JobRecord, Level, Request
from workbench.store.run_folder import newest_whole
from workbench.store.store import Store

log = logging.getLogger(__name__)


class InitialWeights:
    """Has the assistant make the initial weights of jobs, by a call that is a job like others.

    Args:
        folder: the cluster's folder; weights are kept in it.
    """

    def __init__(self, store: Store, folder: Path, assistant: int) -> None:
        self._store, self._folder, self._assistant = store, folder, assistant
        self._has_asked = False

    def were_asked_for(self) -> bool:
        """Whether a call waits in the queue since this was last asked.

        What this process writes is no news from the store: nobody else would look for it soon.
        """
        asked, self._has_asked = self._has_asked, False
        return asked

    def of(self, whole: JobRecord) -> Path | None:
        """The file for a job, made once for all ranks; None while it is being made.

        Raises:
            ClusterError: it could not be made.
        """
        key = f"weights-{whole.id}"
        number = self._store.meta(key)
        if number is None:
            # Killed between the two: another call is made, which finds the file that the first
            # one made.
            self._store.set_meta(key, str(self._ask(whole)))
            return None
        call = self._store.job(int(number))
        if not call.has_ended:
            return None
        packed = RankFiles(attempt_folder(call.directory, call.attempt), 0).answer
        answer = Answer.unpack(packed) if packed is not None else None
        path = answer.value if answer is not None else None
        if call.state == "finished" and isinstance(path, Path) and path.exists():
            return path
        self._store.set_meta(key, None)
        if call.state == "finished":
            return None  # somebody removed the file: once more
        text = call.error.text if call.error else call.reason
        raise ClusterError(f"the initial weights could not be made: {text}")

    def _ask(self, whole: JobRecord) -> int:
        self._has_asked = True
        return self._store.submit(
            Request(
                kind="call",
                name=f"initial weights of {whole.name}",
                task="initial_weights",
                packed=whole.packed,
                keywords=messages.pack_keywords(
                    {"directory": self._folder / "weights"}, key_of(self._folder)
                ),
                engines=1,
                places=(self._assistant,),
                directory=str(self._folder / "calls" / uuid.uuid4().hex),
                priority=whole.priority,
            )
        )


_ANSWERS_WITHIN_S = 1.0


def _listens(meeting: str) -> bool:
    """Whether a process listens at "address:port"; else ranks would come in vain."""
    try:
        socket.create_connection(_parts_of(meeting), _ANSWERS_WITHIN_S).close()
    except OSError:
        return False
    return True


def _parts_of(meeting: str) -> tuple[str, int]:
    address, _, port = meeting.rpartition(":")
    return address, int(port)


# A forked engine is there in a moment; one on another host, or on a GPU, takes some 4 s.
REPLACED_WITHIN_S = 10.0
GIVEN_UP_AFTER_S = 120.0
PARKED_AFTER_S = 30.0
FOUND_SOON_S = 0.005  # a checkpoint, where there is none or a small one


class JobRunner:
    """What happens to jobs that hold engines."""

    def __init__(
        self,
        folder: Path,
        store: Store,
        spec: ClusterSpec,
        fleet: Fleet,
        engine_calls: EngineCalls,
        weights: InitialWeights,
    ) -> None:
        self._folder = folder
        self._store, self._spec, self._fleet, self._engine_calls = store, spec, fleet, engine_calls
        self._weights = weights
        self._reader = ThreadPoolExecutor(2, "checkpoints")

    def advance(self, work: Work, now: float) -> bool:
        """Does what is due for one job; whether it still holds engines."""
        if work.record.kind == "lease":
            return self._hold(work)
        work.take_up(now)
        if work.attempt is None:
            return self._gather(work, now)
        attempt, requested = work.attempt, work.record.requested
        is_news = attempt.poll(now, self._fleet.died, lambda process: self._fleet.how(process, now))
        if work.record.state == "running" and not (is_news or requested):
            return True
        abort = requested == "cancel" or bool(
            requested and (work.record.kind != "train" or attempt.none_has_begun())
        )
        if not attempt.has_begun and not abort:  # else those that have would wait for the others
            self._deliver(work, attempt, now)
        attempt.steer(now, stop=bool(requested), abort=abort)
        if attempt.has_ended:
            return self._conclude(work, attempt, now)
        if work.record.state == "starting" and self._has_started(work, attempt):
            work.moved_at = now
            if self._store.update(work.record.id, only_in=STARTING, state="running"):
                work.record = self._store.job(work.record.id)
        return True

    def bear(self, work: Work, error: Exception, now: float) -> bool:
        """What becomes of a job for which nothing could be done; whether it still holds engines.

        A disk may be slow or full for a while. A job that ails for longer is parked, and no other
        has to do with it.

        Args:
            error: why nothing could be done: its folder is gone, or somebody else's.
        """
        if work.ails_since is None:
            work.ails_since = now
            log.warning("job %d ails", work.record.id, exc_info=error)
        if now - work.ails_since < PARKED_AFTER_S:
            return True
        for rank in work.attempt.ranks if work.attempt is not None else ():
            if not rank.has_ended:
                rank.process.send(signal.SIGKILL)
        text = f"{type(error).__name__}: {error}"
        parked = JobOutcome("parked", text, ErrorRecord("ClusterError", text))
        return not self._release(work, parked)

    def _hold(self, work: Work) -> bool:
        """A lease holds engines, and no more."""
        if work.record.requested:
            return not self._release(work, JobOutcome("finished", "released"))
        if work.record.state == "starting":
            self._store.update(work.record.id, only_in=STARTING, state="running")
            work.record = self._store.job(work.record.id)
        return True

    def _gather(self, work: Work, now: float) -> bool:
        """Begins the attempt as soon as all its engines are there."""
        record = work.record
        if record.requested:
            return not self._release(work, becomes(record.requested))
        if work.newest is None:
            # Beside all else: so much is read while engines are replaced.
            work.newest = self._reader.submit(newest_whole, Path(record.directory))
        if record.kind == "call" and (lost := self._fleet.loss(record)) is not None:
            return not self._release(work, JobOutcome("failed", lost.text, lost))
        missing = [place for place in record.held if not self._fleet.is_ready(place)]
        if not missing:
            return self._begin(work, now)
        may_move = record.kind == "train" and record.places is None and work.is_over
        waited = now - work.waits_since
        if waited > REPLACED_WITHIN_S and may_move and len(self._fleet.idle()) >= len(missing):
            # Other ones, on other hosts or devices: whoever schedules knows which.
            reason = f"engines {missing} did not come back soon, and others are free"
            return not self._release(work, JobOutcome("queued", reason))
        if waited > GIVEN_UP_AFTER_S:
            reason = f"engines {missing} did not come back"
            return not self._release(work, JobOutcome("queued", reason))
        return True

    def _begin(self, work: Work, now: float) -> bool:
        """Writes down on which processes, and from which checkpoint, the attempt runs."""
        record, newest = work.record, work.newest
        if newest is None or not wait((newest,), FOUND_SOON_S).done:
            return True
        if work.is_over and not self._store.claim(
            record.id, record.attempt, record.held, only_in=STARTING
        ):
            work.record = self._store.job(record.id)  # it was ended
            return work.record.state in ACTIVE
        found, damaged = newest.result()
        for text in damaged:
            self._store.event(text, kind="checkpoint", level="warning", job=record.id)
        fields = {"checkpoint": str(found.path) if found else None, "reason": ""}
        whole = self._store.job(record.id)
        if found is None and whole.needs_weights:
            try:
                weights = self._weights.of(whole)
            except ClusterError as error:
                failed = ErrorRecord("ClusterError", str(error))
                return not self._release(work, JobOutcome("failed", str(error), failed))
            if weights is None:
                return True
        note_beginning(record)
        processes = self._fleet.processes(record.held)
        self._store.update(record.id, only_in=ACTIVE, processes=processes, **fields)
        work.begin(self._store.job(record.id), now)
        return True

    def _deliver(self, work: Work, attempt: Attempt, now: float) -> None:
        """Calls the ranks that have not begun."""
        meeting = self._store.meta("meeting")
        if meeting is None or not _listens(meeting):
            return  # the supervisor is about to say where ranks meet

        def call(rank: Rank) -> None:
            engine = self._fleet.records[rank.place]
            if engine.process != rank.process or engine.engine_id is None:
                return  # it died; that is seen elsewhere
            given = Assignment(
                whole.task,
                whole.packed,
                whole.keywords,
                own[rank.number],
                attempt.folder,
                rank.number,
                trains=whole.kind == "train",
            )
            tag = (whole.id, attempt.number, rank.number)
            self._engine_calls.call(engine.engine_id, given, job=whole.id, tag=tag)

        whole = self._store.job(work.record.id)
        own = self._own(whole, attempt, meeting)
        try:
            attempt.deliver(call, now)
        except ControlMessageTooLarge as error:
            attempt.refuse(0, error)
        except ClusterError:
            attempt.deliver_soon()  # there is no controller now

    def _own(self, whole: JobRecord, attempt: Attempt, meeting: str) -> list[dict[str, object]]:
        """What each rank is told besides what its job says."""
        if all(rank.place == self._spec.num_engines for rank in attempt.ranks):
            return [{} for _ in attempt.ranks]  # the assistant meets nobody
        devices = [self._spec.devices[rank.place] for rank in attempt.ranks]
        prefix = f"job-{whole.id}-{attempt.number}"
        shared: dict[str, object] = {}
        if whole.kind == "train":
            shared["directory"] = Path(whole.directory)
        if whole.checkpoint:
            shared["resume"] = Path(whole.checkpoint)
        elif whole.needs_weights:
            shared["weights"] = self._weights.of(whole)
        # Whichever server calls a rank, and however often, it finds the others.
        secret = hmac.digest(key_of(self._folder), prefix.encode(), "sha256")[:16].hex()
        address, port = _parts_of(meeting)
        return [
            {
                "config": RankConfig(
                    rank=rank,
                    world_size=len(devices),
                    address=address,
                    port=port,
                    prefix=prefix,
                    timeout_s=self._spec.timeout_s,
                    device="cuda:0" if device.kind == "cuda" else "cpu",
                    threads=device.threads,
                    host=device.host,
                    secret=secret,
                ),
                **shared,
            }
            for rank, device in enumerate(devices)
        ]

    def _has_started(self, work: Work, attempt: Attempt) -> bool:
        """Whether it makes steps; a call, whether it was begun."""
        if work.record.kind != "train":
            return attempt.has_begun
        return attempt.has_begun and attempt.ranks[0].last_row() is not None

    def _conclude(self, work: Work, attempt: Attempt, now: float) -> bool:
        """Writes down how an attempt ended, and what becomes of its job."""
        record = work.record
        rows = {rank.number: row for rank in attempt.ranks if (row := rank.last_row())}
        work.pace.poll(rows)
        verdict = decide_outcome(
            record, attempt.ends(), record.requested, step=work.step, resumed=work.resumed
        )
        step = verdict.outcome.step if verdict.outcome else work.step
        directory, found = Path(record.directory), None
        if record.kind == "train":
            found, _ = newest_whole(directory, checked=False)
        over = AttemptRecord(
            attempt.number,
            record.held,
            started_at=attempt.began_at,
            ended_at=time.time(),
            step=step,
            reason=verdict.reason,
            resumed=work.resumed,
            is_lost=verdict.is_lost,
        )
        fields = {
            "attempts": (*record.attempts, over),
            "step": step,
            "checkpoint": str(found.path) if found else record.checkpoint,
        }
        if verdict.state != "starting":
            return not self._release(work, verdict, **fields)
        goes_on = f"from step {found.step}" if found else "from the beginning"
        reason = f"{verdict.reason}; goes on {goes_on} once its engines are there"
        self._store.update(
            record.id, only_in=ACTIVE, state="starting", processes=(), reason=reason, **fields
        )
        self._store.event(reason, kind="lost", level="warning", job=record.id)
        work.record, work.attempt = self._store.job(record.id), None
        work.waits_since = now
        return work.record.state in ACTIVE

    def _release(self, work: Work, verdict: JobOutcome, **fields: Any) -> bool:
        """Gives the engines back with the job's new state; whether it is no more ours."""
        record = work.record
        reason, error = verdict.reason, verdict.error
        goes_on = verdict.state in ("queued", "paused")
        known = replace(self._store.job(record.id), **fields)
        note_end(self._store, known, verdict, work.attempt.ends() if work.attempt else ())
        self._store.release(
            record.id,
            verdict.state,
            only_in=ACTIVE,
            reason=reason,
            error=None if goes_on else error,
            requested="",
            **fields,
        )
        level: Level = "error" if verdict.state in ("failed", "parked") else "info"
        told = f"{record.name} {'waits again' if verdict.state == 'queued' else verdict.state}"
        text = f"{told}: {reason}" if reason else told
        self._store.event(text, kind=verdict.state, level=level, job=record.id)
        return True
