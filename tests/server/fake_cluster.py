"""A supervisor, engines and a server for the tests, all light, all processes of their own."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.plan.graphs import mlp
from tests.server.meeting import meeting_place
from tests.store.test_messages import experiment
from workbench.plan import Plan
from workbench.plan.extension.sealed import KEY_FILE
from workbench.store import messages
from workbench.store.cluster_spec import HERE, KEY, ClusterSpec, EngineDevice, key_of
from workbench.store.process import SERVER, ProcessIdentity, holder
from workbench.store.record import JobRecord, Request
from workbench.store.store import Store

WITHIN_S = 60.0
LEASE_S = 2.0
PACKAGE = "tests.server"


class FakeCluster:
    """`num_engines` engines and an assistant, kept alive; and a job server, which may be killed."""

    def __init__(self, folder: Path, num_engines: int = 2, *, seed: int | None = None) -> None:
        self.folder, self.num_engines = folder, num_engines
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "arrivals").mkdir()
        device = EngineDevice("cpu", "here", "cpu", (), 1, 1 << 30)
        devices, sites = (device,) * (num_engines + 1), (HERE,) * (num_engines + 1)
        ClusterSpec(
            devices=devices,
            sites=sites,
            address="127.0.0.1",
            timeout_s=4.0,
            lease_s=LEASE_S,
            suspicion_s=0.3,
        ).save(folder)
        self.store = Store(folder / "server.sqlite", create=True)
        self.meeting = ExitStack()
        self.store.set_meta("meeting", self.meeting.enter_context(meeting_place()))
        self.packed = messages.pack(experiment(Plan.data_parallel(mlp(4, 4), 2)))
        self.engines: dict[int, subprocess.Popen] = {}
        self.server: subprocess.Popen | None = None
        self.replaces = True
        self.closing = threading.Event()
        self.keeping = threading.Thread(target=self.keep, daemon=True)
        for index in range(num_engines + 1):
            self.start_engine(index)
        self.start_server(*([] if seed is None else [seed]))
        self.keeping.start()

    def start_engine(self, index: int) -> None:
        engine = run("fake_engine", self.folder)
        self.engines[engine.pid] = engine
        self.store.set_engine(
            index,
            state="starting",
            process=ProcessIdentity.of(engine.pid),
            engine_id=None,
            is_assistant=index == self.num_engines,
            memory_bytes=1 << 30,
        )

    def start_server(self, *seed: int) -> None:
        self.server = run("fake_server", self.folder, *seed)

    def kill_server(self) -> None:
        assert self.server is not None
        with suppress(ProcessLookupError):
            if (server := holder(self.folder / SERVER)) is not None:
                os.kill(server.pid, signal.SIGKILL)
        self.server.kill()
        self.server.wait()

    def keep(self) -> None:
        """As the supervisor does: says of engines that they died, and starts others."""
        while not self.closing.wait(0.05):
            for pid, engine in list(self.engines.items()):
                if engine.poll() is None:
                    continue
                del self.engines[pid]
                for record in self.store.engines():
                    if record.pid == pid:
                        death = f"was ended by {signal.Signals(-engine.returncode).name}"
                        self.store.set_engine(record.index, state="dead", death=death)
                        if self.replaces:
                            self.start_engine(record.index)

    def submit(
        self, task: str = "train", *, engines: int = 2, kind: str = "train", **fields
    ) -> int:
        number = len(list(self.folder.glob("job-*")))
        directory = self.folder / f"job-{number}"
        directory.mkdir()
        keywords = fields.pop("keywords", {})
        return self.store.submit(
            Request(
                kind=kind,
                name=f"job {number}",
                task=f"{PACKAGE}.fake_tasks:{task}" if task else "",
                packed=self.packed,
                keywords=messages.pack_keywords(keywords, key_of(self.folder)),
                engines=engines,
                directory=str(directory),
                **{"owner": ProcessIdentity.here() if kind != "train" else None, **fields},
            )
        )

    def until(self, job: int, *states: str, within_s: float = WITHIN_S) -> JobRecord:
        deadline = time.monotonic() + within_s
        while (record := self.store.job(job)).state not in states:
            assert time.monotonic() < deadline, (record, self.store.events())
            assert not record.has_ended, (record, self.store.events())
            time.sleep(0.01)
        return record

    def ended(self, job: int, within_s: float = WITHIN_S) -> JobRecord:
        deadline = time.monotonic() + within_s
        while not (record := self.store.job(job)).has_ended:
            assert time.monotonic() < deadline, (record, self.store.events())
            time.sleep(0.01)
        return record

    def at_step(self, job: int, step: int) -> JobRecord:
        """Returns when a job has begun its step, as its ranks say."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            record = self.store.job(job)
            meeting = Path(record.directory) / "meetings" / f"job-{job}-{record.attempt}"
            if (meeting / f"{step}-0").exists():
                return record
            assert time.monotonic() < deadline, (record, self.store.events())
            time.sleep(0.005)

    def ask(self, kind: str, job: int | None = None, **payload: object) -> str:
        """Has the server do something; gives its error."""
        number = self.store.command(kind, job, **payload)
        deadline = time.monotonic() + WITHIN_S
        while (command := self.store.command_of(number)).done_at is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return command.error

    def said(self, job: int) -> str:
        return "\n".join(event.text for event in self.store.events(job=job))

    def close(self) -> None:
        self.closing.set()
        self.keeping.join()
        if self.server is not None:
            self.kill_server()
        for engine in self.engines.values():
            with suppress(ProcessLookupError):
                os.kill(engine.pid, signal.SIGCONT)
            engine.kill()
            engine.wait()
        self.meeting.close()


def run(module: str, folder: Path, *arguments: object) -> subprocess.Popen:
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    environment = {**os.environ, "PYTHONPATH": path, KEY_FILE: str(folder / KEY)}
    command = [sys.executable, "-m", f"{PACKAGE}.{module}", *map(str, (folder, *arguments))]
    return subprocess.Popen(command, env=environment)
