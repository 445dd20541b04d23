"""What runs on an engine, and what becomes of the engine's memory between two runs.

The job server calls these functions and has no torch: it is imported where it is used.

glibc maps large tensors anew each time and gives back what is free at the heap's end, from sizes
on that depend on what has been freed so far: a small network's step then touches thousands of
pages for the first time, over and over, and a tenth of its time goes into that (measured: ResNet-18
on 8 images of 32 x 32, 4,600 page faults in every step, and 18 with these settings). So freed
memory stays until a task is over.

A full garbage collection goes through all that torch has imported, in a tenth of a second, in some
step of some rank. What is there before the first task is there for good, and is left out of it.
"""

import ctypes
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.extension.sealed import own_key
from workbench.plan.extension.user_object import opened
from workbench.store import messages, tasks
from workbench.store.messages import Answer, Assignment, StopRequest
from workbench.store.process import own_pid
from workbench.store.rank_files import RankFiles
from workbench.store.telemetry import Telemetry

INTERRUPT_AGAIN_S = 0.05
ERRORS = 2  # the descriptor: `sys.stderr` is ipykernel's
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_NEVER = -1
_MOST_MMAP_BYTES = 2**25  # glibc takes no more


def introduce() -> int:
    """Returns the process by which this engine is known."""
    return own_pid()


def run(given: Assignment) -> None:
    """Calls a function and answers for it in files, whatever it does; see `rank_files`.

    Nothing happens where this rank of this attempt has begun before: a call may arrive twice.
    Whatever a rank that has begun comes to is in its answer; where that cannot be written, its
    process ends. An error of this call would be lost on a server that is not there to hear it.

    Raises:
        OSError: the rank could not begin, and has not; it may be called again.
        SealError: this process is no engine of a cluster.
    """
    files, key = RankFiles(given.folder, given.rank), own_key()
    control = StopRequest(renew=files.renew)
    telemetry: Telemetry | None = None
    try:
        # Before anybody knows whom to interrupt.
        with _signals(control, files, trains=given.trains):
            if not files.begin():
                return
            # ipykernel would send what is printed through the controller.
            with (
                files.log.open("w", buffering=1) as out,
                redirect_stdout(out),
                redirect_stderr(out),
            ):
                if files.is_withdrawn:
                    raise KeyboardInterrupt
                telemetry = Telemetry(files) if given.trains else None
                keep_freed()
                extra = {} if telemetry is None else {"control": control, "emit": telemetry.emit}
                value = tasks.call(
                    given.task,
                    experiment=opened(messages.unpack(given.experiment, key)),
                    **{**messages.unpack_keywords(given.keywords, key), **given.own, **extra},
                )
        answer = Answer("returned", value)
    except BaseException as error:
        if files.pid != own_pid() or files.answer is not None:
            raise  # it has not begun, or it was called again
        answer = Answer.of(error)
    give_back(keep=files.is_lost)
    _leave(files, replace(answer, lost_rows=telemetry.close() if telemetry else 0), key)


def _leave(files: RankFiles, answer: Answer, key: bytes) -> None:
    """Writes the answer, or why there can be none; ends this process where the disk is full."""
    try:
        try:
            files.end(answer, key)
        except OSError:
            raise
        except Exception as error:  # too large, or nothing that can be pickled
            files.end(replace(Answer.of(error), lost_rows=answer.lost_rows))
    except OSError as error:
        text = f"rank {files.rank} ends, as it cannot write its answer: {error}\n"
        os.write(ERRORS, text.encode())
        os._exit(os.EX_IOERR)


def initial_weights(experiment: Experiment, directory: Path) -> Path:
    """Writes the model's initial weights and returns the file; see `model.weights.initial`."""
    from workbench.model.weights.initial import initialize

    return initialize(experiment.plan.graph, experiment.seed, directory)


def unsplit_model(
    experiment: Experiment,
    weights: Path | None,
    directory: Path,
    start: Path,
    path: Path,
) -> None:
    """Writes what the unsplit model computes; see `train.verify.whole_model.write_reference`."""
    from workbench.train.verify.whole_model import write_reference

    weights = initial_weights(experiment, directory) if weights is None else weights
    write_reference(experiment, weights, start, path)


def keep_freed() -> None:
    """From now on freed memory stays with the process; what has been imported is not collected."""
    if gc.get_freeze_count() == 0:
        gc.collect()
        gc.freeze()
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_TRIM_THRESHOLD, _NEVER)
        libc.mallopt(_MMAP_THRESHOLD, _MOST_MMAP_BYTES)


def give_back(*, keep: bool = False) -> None:
    """What nobody needs any more is freed, and goes back to the system: models are full of cycles.

    Args:
        keep: whether freed memory stays with this process, which will want as much again soon: to
            give a gigabyte back and to have it filled with zeros again takes half a second.
    """
    gc.collect()
    if keep:
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def _signals(control: StopRequest, files: RankFiles, *, trains: bool) -> Iterator[None]:
    """SIGUSR1 asks to stop after this step; SIGINT raises KeyboardInterrupt, but only in here.

    What was meant for an earlier rank of this process is for none: it may come late from another
    host. The attempt's folder says whether this one is asked to stop, or was given up; of what does
    not train, cells of a notebook, whoever interrupts it says so elsewhere.

    An interrupt that came a moment later would hit the answer while it is written, or ipykernel,
    and be lost or lose it. ipykernel sets its own handler again afterwards.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        if files.is_stopping:
            control.stop_requested = True

    interrupts = _Interrupts(lambda: not trains or files.is_withdrawn)
    signal.signal(signal.SIGUSR1, stop)
    signal.signal(signal.SIGINT, interrupts)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        interrupts.forget()


class _Interrupts:
    """Raises KeyboardInterrupt; where something is being imported, once it is.

    Half of a module would stay in this process, and break whatever next wants the whole.
    """

    def __init__(self, are_meant: Callable[[], bool]) -> None:
        self._are_meant = are_meant
        self._later: list[threading.Timer] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._are_meant():
            return
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                again = threading.Timer(INTERRUPT_AGAIN_S, os.kill, (os.getpid(), number))
                self._later.append(again)
                again.start()
                return
            frame = frame.f_back
        raise KeyboardInterrupt

    def forget(self) -> None:
        """What was put off is not for whatever this process does next."""
        for again in self._later:
            again.cancel()
            again.join()
