"""The functions that a process has an engine call by name: the one list of them.

Client and job server pass names. What is named here is imported on engines alone, when it is
called, and by the supervisor's template. A user's function goes by "module:function".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Task:
    """A function of a room, and the keywords that whoever calls it may give.

    Besides, a task of a job gets `experiment`, `config` if it is a rank of several, and `weights`.
    """

    room: str
    function: str
    keywords: tuple[str, ...] = ()


TASKS: Mapping[str, Task] = {
    "introduce": Task("engine", "calls:introduce"),
    "run": Task("engine", "calls:run"),
    "initial_weights": Task("engine", "calls:initial_weights", ("directory",)),
    "unsplit_model": Task("engine", "calls:unsplit_model", ("directory", "start", "path")),
    "train": Task("train", "run.loop:train", ("directory", "resume", "control", "emit")),
    "cells": Task("train", "run.cells:serve", ("folder",)),
    "compare": Task("train", "verify.verify:compare_into", ("reference", "repeat", "found")),
    "device": Task("train", "measure.device:device", ("within_s",)),
    "links": Task("train", "measure.links:links", ("within_s",)),
    "workspaces": Task("train", "measure.device:workspaces", ("rows",)),
    "layers": Task("train", "measure.layers:layers", ("rows", "within_s")),
    "trace_sums": Task("train", "measure.links:trace_sums", ("numel", "times")),
    "recorded_sums": Task("train", "measure.links:recorded_sums", ("lengths",)),
    "own_strategy": Task("train", "verify.verify:observed", ("directory", "cut", "saved_after")),
    "cut_weights": Task("train", "verify.verify:cut_weights"),
}


def place_of(task: str) -> tuple[str, str]:
    """Returns the module and the name of a task, or of a user's "module:function"."""
    if task in TASKS:
        module, _, name = TASKS[task].function.partition(":")
        return f"workbench.{TASKS[task].room}.{module}", name
    module, _, name = task.partition(":")
    return module, name


def call(task: str, /, *arguments: Any, **keywords: Any) -> Any:
    """Calls a task by its name, in this process; what it raises is raised here."""
    module, name = place_of(task)
    return getattr(import_module(module), name)(*arguments, **keywords)
