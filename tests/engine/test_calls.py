"""What an engine does when it is called: the rank's files tell it all."""

import errno
import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
from ipyparallel.error import RemoteError

from tests.client.fake_session import row
from tests.plan.graphs import mlp
from tests.store.test_messages import experiment as experiment_of
from workbench.engine import calls
from workbench.engine.calls import INTERRUPT_AGAIN_S, run
from workbench.plan import Plan
from workbench.plan.extension.sealed import KEY_BYTES, KEY_FILE, SealError
from workbench.store import messages
from workbench.store.messages import Answer, Assignment
from workbench.store.rank_files import RankFiles, ask_to_stop, withdraw
from workbench.store.telemetry import RowReader

ROOT = Path(__file__).resolve().parents[2]
KEY = bytes(KEY_BYTES)
EXPERIMENT = experiment_of(Plan.data_parallel(mlp(4, 4), 2))


@pytest.fixture(autouse=True)
def of_a_cluster(tmp_path_factory, monkeypatch):
    """Which has a key."""
    path = tmp_path_factory.mktemp("cluster") / "key"
    path.write_bytes(KEY)
    monkeypatch.setenv(KEY_FILE, str(path))


@pytest.fixture(autouse=True)
def our_signals():
    """A call leaves an engine deaf to signals; this process is none."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def adds(*, experiment, first, second, **_own):
    print("it adds", file=sys.stderr)
    return first + second + experiment.batch_size


def emits(*, experiment, control, emit):
    for step in range(3):
        emit(row(step, 0))
    print("all is said")
    raise ValueError("enough")


def returns_too_much(**_given):
    return os.urandom(100_000)


def returns_a_tensor(**_given):
    import torch

    return torch.ones(2)


def returns_what_cannot_travel(**_given):
    return lambda: None


def imports(*, name, **_given):
    importlib.import_module(name)
    time.sleep(60)


def imports_and_ends(*, name, **_given):
    importlib.import_module(name)
    return "ended"


def takes_a_while(**_given):
    time.sleep(4 * INTERRUPT_AGAIN_S)
    return "was left alone"


def is_signalled(*, control, **_given):
    os.kill(os.getpid(), signal.SIGUSR1)
    return control.stop_requested


def is_interrupted(*, given_up=None, **_given):
    if given_up is not None:
        withdraw(given_up)
    os.kill(os.getpid(), signal.SIGINT)
    return "was left alone"


def called(folder, task, *, trains=False, own=None, **keywords):
    folder.mkdir(exist_ok=True)
    packed, arguments = messages.pack(EXPERIMENT), messages.pack_keywords(keywords, KEY)
    task = f"tests.engine.test_calls:{task}"
    run(Assignment(task, packed, arguments, own or {}, folder, 0, trains))
    return RankFiles(folder, 0)


def test_a_value_is_returned(tmp_path):
    files = called(tmp_path, "adds", first=1, own={"second": 2})
    answer = Answer.unpack(files.answer)
    assert (answer.kind, answer.value) == ("returned", 3 + EXPERIMENT.batch_size)
    assert files.pid == os.getpid()
    assert files.log.read_text() == "it adds\n"


@pytest.mark.parametrize("asked", [True, False])
def test_a_signal_stops_a_rank_only_where_its_attempt_is_asked_to(tmp_path, asked):
    """One that comes late, from another host, was meant for who ran here before."""
    if asked:
        ask_to_stop(tmp_path)
    files = called(tmp_path, "is_signalled", trains=True)
    assert Answer.unpack(files.answer).value is asked


@pytest.mark.parametrize("given_up", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_an_interrupt_is_for_a_rank_that_trains_only_where_its_attempt_is_given_up(
    tmp_path, given_up, trains
):
    own = {"given_up": tmp_path} if given_up else {}
    answer = Answer.unpack(called(tmp_path, "is_interrupted", trains=trains, own=own).answer)
    assert answer.kind == ("interrupted" if given_up or not trains else "returned")


@pytest.fixture
def half_imported(tmp_path, monkeypatch):
    """A module that is interrupted while it is imported."""
    text = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nis_whole = True\n"
    (tmp_path / "half_imported.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("half_imported")
def test_an_interrupt_of_what_has_ended_does_not_hit_what_comes_next(tmp_path):
    files = called(tmp_path / "1", "imports_and_ends", own={"name": "half_imported"})
    assert Answer.unpack(files.answer).value == "ended"
    assert sys.modules.pop("half_imported").is_whole
    files = called(tmp_path / "2", "takes_a_while")
    assert Answer.unpack(files.answer).value == "was left alone"


@pytest.mark.usefixtures("half_imported")
def test_an_interrupt_waits_for_what_is_being_imported(tmp_path):
    files = called(tmp_path, "imports", own={"name": "half_imported"})
    assert Answer.unpack(files.answer).kind == "interrupted"
    assert sys.modules.pop("half_imported").is_whole


def test_rows_precede_the_answer_that_counts_those_lost(tmp_path):
    files = called(tmp_path, "emits", trains=True)
    answer = Answer.unpack(files.answer)
    assert (answer.kind, answer.error, answer.lost_rows) == ("raised", ("ValueError", "enough"), 0)
    assert [each["step"] for each in RowReader(files).read()] == [0, 1, 2]
    assert files.log.read_text() == "all is said\n"


def test_a_call_that_comes_twice_is_one(tmp_path):
    files = called(tmp_path, "adds", first=1, second=2)
    before = files.answer
    called(tmp_path, "adds", first=5, second=5)
    assert files.answer == before


def test_a_rank_of_an_attempt_that_was_given_up_does_nothing(tmp_path):
    withdraw(tmp_path)
    files = called(tmp_path, "adds", first=1, second=2)
    assert Answer.unpack(files.answer).kind == "interrupted"
    assert files.log.read_text() == ""


def test_who_is_interrupted_before_it_can_say_so_was_interrupted():
    assert Answer.of(RemoteError("KeyboardInterrupt", "", "")).kind == "interrupted"
    raised = Answer.of(RemoteError("KeyError", "'x'", ""))
    assert (raised.kind, raised.error) == ("raised", ("KeyError", "'x'"))


def test_too_large_an_answer_is_refused(tmp_path):
    answer = Answer.unpack(called(tmp_path, "returns_too_much").answer)
    assert answer.error[0] == "ControlMessageTooLarge"
    assert "at most 65,536" in answer.error[1]


def test_what_cannot_travel_is_told(tmp_path):
    answer = Answer.unpack(called(tmp_path, "returns_what_cannot_travel").answer)
    assert answer.kind == "raised"
    assert "returns_what_cannot_travel" in answer.error[1]


def test_a_rank_that_cannot_answer_ends_its_process(tmp_path, monkeypatch, capfd):
    """Its error would be lost on a server that is not there; the end of a process is seen later."""

    def full(files, answer):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RankFiles, "end", full)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        called(tmp_path, "adds", first=1, second=2)
    assert ended.value.code == os.EX_IOERR
    assert "rank 0 ends, as it cannot write its answer: [Errno 28]" in capfd.readouterr().err


@pytest.mark.parametrize(("lost", "kept"), [(True, True), (False, False), (None, False)])
def test_memory_stays_with_a_rank_that_goes_on_soon(tmp_path, monkeypatch, lost, kept):
    told = []
    monkeypatch.setattr(calls, "give_back", lambda *, keep: told.append(keep))
    if lost is not None:
        withdraw(tmp_path, lost=lost)
    called(tmp_path, "adds", first=1, second=2)
    assert told == [kept]


def test_a_rank_that_could_not_begin_begins_at_the_next_call(tmp_path, monkeypatch):
    def full(descriptor, mode):
        os.close(descriptor)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", full)
        with pytest.raises(OSError, match="No space left"):
            called(tmp_path, "adds", first=1, second=2)
    assert Answer.unpack(called(tmp_path, "adds", first=1, second=2).answer).kind == "returned"


def test_an_interrupt_that_comes_at_once_is_answered(tmp_path, monkeypatch):
    begin = RankFiles.begin

    def seen(files):
        has_begun = begin(files)
        signal.raise_signal(signal.SIGINT)
        return has_begun

    monkeypatch.setattr(RankFiles, "begin", seen)
    files = called(tmp_path, "adds", first=1, second=2)
    assert Answer.unpack(files.answer).kind == "interrupted"


def test_a_task_that_is_not_there_is_told(tmp_path):
    answer = Answer.unpack(called(tmp_path, "nothing").answer)
    assert answer.error[0] == "AttributeError"


def test_an_answer_is_read_without_what_its_value_is_made_of(tmp_path):
    packed = called(tmp_path, "returns_a_tensor").answer
    (tmp_path / "packed").write_bytes(packed)
    code = (
        "import sys; from workbench.store.messages import Answer; "
        f"packed = open({str(tmp_path / 'packed')!r}, 'rb').read(); "
        "answer = Answer.unpack(packed); "
        "print(answer.kind, answer.value, 'torch' in sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert said.stdout == "returned None False\n"
    assert Answer.unpack(packed, KEY).value.tolist() == [1.0, 1.0]


def test_what_is_under_another_key_is_never_loaded(tmp_path, monkeypatch):
    """Neither arguments on an engine, nor what a call returned."""
    packed = called(tmp_path / "1", "returns_a_tensor").answer
    assert Answer.unpack(packed).value is None
    with pytest.raises(SealError, match="not written under this cluster's key"):
        Answer.unpack(packed, bytes(range(KEY_BYTES)))
    monkeypatch.setitem(globals(), "KEY", bytes(range(KEY_BYTES)))
    answer = Answer.unpack(called(tmp_path / "2", "adds", first=1, second=2).answer)
    assert answer.error[0] == "SealError"


@pytest.mark.parametrize("packed", [b"", b"x", zlib.compress(b"[]"), zlib.compress(b'{"a": 1}')])
def test_what_is_no_answer_is_an_error(packed):
    with pytest.raises(ValueError, match=r"no answer|JSON|valid"):
        Answer.unpack(packed)


def test_an_answer_that_is_a_pickle_executes_nothing(tmp_path):
    class Planted:
        def __reduce__(self):
            return open, (str(tmp_path / "executed"), "w")

    with pytest.raises(ValueError, match=r"."):
        Answer.unpack(zlib.compress(pickle.dumps(Planted())))
    assert not (tmp_path / "executed").exists()


def test_the_job_server_s_side_loads_no_torch():
    code = (
        "import sys, workbench.engine.calls, workbench.server.engine_calls, "
        "workbench.hosts.host, workbench.store.telemetry, workbench.store.cluster_spec; "
        "print('torch' in sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert said.stdout == "False\n"


@pytest.mark.parametrize("text", ["", "12"])
def test_a_process_id_is_known_once_it_is_written(tmp_path, text):
    (tmp_path / "rank-0.alive").write_text(text)
    assert RankFiles(tmp_path, 0).pid == (12 if text else None)


STEP = """
import os
import numpy as np
from workbench.engine.calls import give_back, keep_freed

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

keep_freed()
before = resident()
tensors = [np.ones(2**17 * size) for size in (2, 4, 8)]  # MiB
del tensors
kept = resident()
give_back()
print(kept - before, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="these are settings of glibc")
def test_freed_memory_stays_until_it_is_given_back():
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    kept, left = map(float, done.stdout.split())
    assert kept > 13
    assert left < 4
