"""What runs on an engine.

The job server calls these functions and has no torch: it is imported where it is used.
"""

import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from workbench.engine import heap
from workbench.plan.experiment import Experiment
from workbench.store import message
from workbench.store.answer import Answer
from workbench.store.errors import ClusterError
from workbench.store.outcome import Control
from workbench.store.rank_files import RankFiles, own_pid
from workbench.store.telemetry import Telemetry

INTERRUPT_AGAIN_S = 0.05
ERRORS = 2  # the descriptor: `sys.stderr` is ipykernel's


def introduce() -> tuple[int, int]:
    """Which engine this is, and its process id."""
    return int(os.environ["WORKBENCH_ENGINE"]), own_pid()


def assume_identity(
    index: int, cores: Sequence[int], threads: int, environment: Mapping[str, str]
) -> tuple[int, int]:
    """Turns an engine that has nothing to do into another one of this host.

    Args:
        index: which.
        cores: logical cores to run on; none: those that it has.
        threads: compute threads.
        environment: what is different there, such as `CUDA_VISIBLE_DEVICES`.

    Returns:
        As `introduce`.

    Raises:
        ClusterError: this process has used CUDA and can be given no other GPU.
    """
    import torch

    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible != os.environ.get("CUDA_VISIBLE_DEVICES"):
        if torch.cuda.is_initialized():
            raise ClusterError(f"engine {index} cannot be made of one that has used CUDA")
    os.environ.update(environment)
    os.environ.update(WORKBENCH_ENGINE=str(index), OMP_NUM_THREADS=str(threads))
    if cores and hasattr(os, "sched_setaffinity"):
        for thread in _threads():
            os.sched_setaffinity(thread, set(cores))
    torch.set_num_threads(threads)
    if visible:
        torch.cuda.init()  # the driver may have been asked when no GPU was to be seen
    return introduce()


def perform(
    task: str,
    experiment: bytes,
    keywords: bytes,
    own: Mapping[str, Any],
    folder: Path,
    rank: int,
    streams: bool,
) -> None:
    """Calls a function and answers for it in files, whatever it does; see `rank_files`.

    Nothing happens where this rank of this attempt has begun before: a call may arrive twice.

    Args:
        task: "module:function"; it gets `experiment`, `keywords` and `own`.
        experiment: packed by `message.pack`.
        keywords: further arguments, packed by `message.pack_keywords`.
        own: those that differ by rank or attempt; they go before `keywords`.
        folder: of the attempt.
        rank: which rank this is.
        streams: whether the function also gets `control`, whose `stop_requested` SIGUSR1
            sets, and `emit`, which takes a row of metrics.

    Whatever a rank that has begun comes to is in its answer; where that cannot be written, its
    process ends. An error of this call would be lost on a server that is not there to hear it.

    Raises:
        OSError: the rank could not begin, and has not; it may be called again.
    """
    files, control = RankFiles(folder, rank), Control()
    telemetry: Telemetry | None = None
    try:
        with _signals(control):  # before anybody knows whom to interrupt
            if not files.begin():
                return
            with _printing_to(files.log):
                if files.is_withdrawn:
                    raise KeyboardInterrupt
                telemetry = Telemetry(files) if streams else None
                heap.keep_freed()
                extra = {} if telemetry is None else {"control": control, "emit": telemetry.emit}
                value = _function(task)(
                    experiment=message.unpack(experiment),
                    **{**message.unpack_keywords(keywords), **own, **extra},
                )
        answer = Answer("returned", value)
    except BaseException as error:
        if files.pid != own_pid() or files.answer is not None:
            raise  # it has not begun, or it was called again
        answer = Answer.of(error)
    heap.give_back()  # the next run wants its memory
    _leave(files, replace(answer, lost_rows=telemetry.close() if telemetry else 0))


def _leave(files: RankFiles, answer: Answer) -> None:
    """Writes the answer, or why there can be none; ends this process where the disk is full."""
    try:
        try:
            files.end(answer)
        except OSError:
            raise
        except Exception as error:  # too large, or nothing that can be pickled
            files.end(replace(Answer.of(error), lost_rows=answer.lost_rows))
    except OSError as error:
        text = f"rank {files.rank} ends, as it cannot write its answer: {error}\n"
        os.write(ERRORS, text.encode())
        os._exit(os.EX_IOERR)


def initial_weights(experiment: Experiment, directory: Path) -> Path:
    """Writes the model's initial weights and returns the file; see `model.weights`."""
    from workbench.model.weights import initialize

    return initialize(experiment.plan.graph, experiment.seed, directory)


def _function(task: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, _, name = task.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


@contextmanager
def _signals(control: Control) -> Iterator[None]:
    """SIGUSR1 asks to stop after this step; SIGINT raises KeyboardInterrupt, but only in here.

    An interrupt that came a moment later would hit the answer while it is written, or ipykernel,
    and be lost or lose it. ipykernel sets its own handler again afterwards.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        control.stop_requested = True

    interrupts = _Interrupts()
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

    def __init__(self) -> None:
        self._later: list[threading.Timer] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
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


@contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """What is printed goes into a file: ipykernel would send it through the controller."""
    with path.open("w", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
        yield


def _threads() -> list[int]:
    """All threads of this process: affinity is each one's own."""
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return [0]
