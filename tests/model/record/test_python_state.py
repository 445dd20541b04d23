"""What Python code remembers is found wherever it lies, and named."""

import copy
import itertools
import logging
import random
import threading
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.model.record import python_state_helpers
from workbench.model import TraceError, trace
from workbench.model.record.python_state import Walk, moved

CALLS = {"number": 0}
LOG = logging.getLogger(__name__)


def a_global():
    CALLS["number"] += 1


def closure():
    number = 0

    def counts():
        nonlocal number
        number += 1

    return counts


def default(seen=[0]):  # noqa: B006
    seen[0] += 1


def attribute():
    attribute.calls += 1


attribute.calls = 0


class Counts:
    """An object whose `step` moves what it is given."""

    total = 0

    def __init__(self, held, step):
        self.held, self.step = held, step

    def __call__(self):
        self.step(self.held)


class OfTheClass:
    total = 0

    def __call__(self):
        type(self).total += 1


def grown(held):
    held.append(held[-1] + 1)


def replaced(held):
    held.held = held.held + 1


@dataclass(slots=True)
class Slotted:
    held: int = 0


class Configured:
    """Has what its table has, and nothing else."""

    def __init__(self):
        self.__dict__["table"] = {"held": 0}

    def __getattr__(self, name):
        return self.table[name]


def in_the_table(config):
    config.table["held"] += 1


def of_a_module():
    python_state_helpers.calls += 1


REMEMBERS = {
    "a global": (a_global, "the global 'CALLS'"),
    "a closure": (closure(), "'number' in the closure of counts"),
    "a default": (default, "the defaults of default"),
    "an attribute of a function": (attribute, "it.calls"),
    "an attribute of a class": (OfTheClass(), "OfTheClass.total"),
    "an iterator": (Counts(itertools.count(), next), "it.held"),
    "a generator": (Counts((n for n in range(9)), next), "it.held"),
    "a list's iterator": (Counts(iter([1, 2, 3]), next), "it.held"),
    "Python's generator": (Counts(random.Random(0), random.Random.random), "it.held"),
    "NumPy's": (Counts(np.random.default_rng(0), lambda g: g.random()), "it.held"),
    "NumPy's old one": (Counts(np.random.RandomState(0), lambda g: g.rand()), "it.held"),
    "torch's": (Counts(torch.Generator(), lambda g: torch.rand(1, generator=g)), "it.held"),
    "a deque": (Counts(deque([0], maxlen=9), grown), "it.held"),
    "an inner object": (Counts(SimpleNamespace(held=0), replaced), "it.held.held"),
    "an object with slots": (Counts(Slotted(), replaced), "it.held.held"),
    "a table of attributes": (Counts(Configured(), in_the_table), "it.held.table"),
    "a module of the user's own": (of_a_module, "python_state_helpers.calls"),
    "one of two with a name": (
        Counts({(0,): 0, (1,): 0}, lambda d: d.update({(0,): 1})),
        "it.held",
    ),
    "a tensor": (Counts(torch.zeros(3), lambda t: t.add_(1)), "it.held"),
    "a tensor's data": (Counts(torch.zeros(3), lambda t: t.data.add_(1)), "it.held"),
    "an array": (Counts(np.zeros(3), lambda a: a.__iadd__(1)), "it.held"),
    "a module's buffer": (
        Counts(nn.BatchNorm1d(3), lambda m: m.running_mean.add_(1)),
        "it.held._buffers",
    ),
}


@pytest.mark.parametrize("name", REMEMBERS)
def test_state_is_found_and_named(name):
    remembers, what = REMEMBERS[name]
    states = [Walk().of(remembers, "it") for _ in range(2)]
    assert moved(*states) == []
    remembers()
    assert moved(states[0], Walk().of(remembers, "it")) == [what]


def logs():
    LOG.debug("called")
    with threading.Lock():
        return itertools.count()


def caches(kept={}):  # noqa: B006
    return kept.setdefault("mask", 3)


@pytest.mark.parametrize("function", [logs, caches, copy.deepcopy, Counts([0], len)])
def test_what_stays_is_no_state(function):
    if function is not copy.deepcopy:
        function()
    before = Walk().of(function, "it")
    if function is not copy.deepcopy:
        function()
    assert moved(before, Walk().of(function, "it")) == []


class Net(nn.Module):
    def __init__(self, remembers):
        super().__init__()
        self.linear, self.remembers = nn.Linear(4, 3), remembers

    def forward(self, x):
        self.remembers()
        return self.linear(x)


@pytest.mark.parametrize(
    "name",
    [
        *("a global", "a closure", "an attribute of a class", "an iterator"),
        *("a list's iterator", "an inner object"),
    ],
)
def test_a_model_that_remembers_is_refused_before_it_matters(name):
    remembers, what = REMEMBERS[name]
    what = "the attribute 'remembers'" if what.startswith("it.") else what
    with pytest.raises(TraceError, match=f"forward changes .*{what}"):
        trace(Net(remembers), input_shape=(4,))


def test_a_mask_that_is_made_once_outside_is_no_state():
    masks = {}

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            size = masks.setdefault("size", x.shape[1])
            return self.linear(x) * size

    assert len(trace(Masked(), input_shape=(4,)).outputs) == 1
