"""What runs on an engine."""

import gc
import importlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from ipyparallel.datapub import publish_data

from workbench.cluster import message
from workbench.cluster.answer import Answer
from workbench.cluster.errors import ControlMessageTooLarge
from workbench.cluster.telemetry import Telemetry
from workbench.model.weights import initialize
from workbench.plan.experiment import Experiment
from workbench.train.control import Control


def introduce() -> tuple[int, int]:
    """Which engine this is, and its process id."""
    return int(os.environ["WORKBENCH_ENGINE"]), os.getpid()


def perform(task: str, experiment: bytes, keywords: Mapping[str, Any], streams: bool) -> bytes:
    """Calls a function and answers for it, whatever it does.

    Args:
        task: "module:function"; it gets `experiment` and `keywords`.
        experiment: packed by `message.pack`.
        keywords: further arguments.
        streams: whether the function also gets `control`, whose `stop_requested` SIGUSR1
            sets, and `emit`, which takes a row of metrics and has it published.

    Returns:
        An `Answer`, packed.
    """
    control = Control()
    telemetry = Telemetry(publish_data) if streams else None
    try:
        with _signals(control):
            extra = {} if telemetry is None else {"control": control, "emit": telemetry.emit}
            value = _function(task)(experiment=message.unpack(experiment), **keywords, **extra)
        answer = Answer("returned", value)
    except BaseException as error:
        answer = Answer.of(error)
    gc.collect()  # the model is full of cycles; the next run wants its memory
    if telemetry is not None:
        first_row, rows = telemetry.close()
        answer = replace(answer, first_row=first_row, rows=rows)
    try:
        return answer.pack()
    except ControlMessageTooLarge as error:
        return replace(Answer.of(error), first_row=answer.first_row, rows=answer.rows).pack()


def initial_weights(experiment: Experiment, directory: Path) -> Path:
    """Writes the model's initial weights and returns the file; see `model.weights`."""
    return initialize(experiment.plan.graph, experiment.seed, directory)


def _function(task: str) -> Callable[..., Any]:
    module, _, name = task.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


@contextmanager
def _signals(control: Control) -> Iterator[None]:
    """SIGUSR1 asks to stop after this step; SIGINT raises KeyboardInterrupt, but only in here.

    An interrupt that came a moment later would hit ipykernel while it sends the answer, and
    the answer would be lost. ipykernel sets its own handler again afterwards.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        control.stop_requested = True

    signal.signal(signal.SIGUSR1, stop)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
