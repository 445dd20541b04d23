"""Explorers that are closed when a test ends, and what they explore."""

import pytest

import workbench as wb
from tests.plan import graphs
from workbench.bench.front_end import FrontEnd

MACHINE = wb.Machine.preset("h100-infiniband")


@pytest.fixture(scope="session")
def prediction():
    """Of a small VGG, split over four ranks."""
    return predicted(wb.Plan.hybrid(graphs.vgg(), 4))


def predicted(plan, machine=MACHINE, **fields):
    given = {"batch_size": 64, "optimizer": wb.SGD(lr=0.1, momentum=0.9), "steps": 9, **fields}
    return wb.predict(plan, machine, wb.Experiment(plan=plan, **given))


@pytest.fixture
def explore():
    """`explore(TimingExplorer, ...)` makes one."""
    made = []

    def make(kind, *arguments, **state):
        made.append(kind(*arguments, **state))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def show(page, problems, explore):
    """`show(TimingExplorer, ...)` shows one."""

    def make(kind, *arguments, theme="light", **state):
        return FrontEnd(page, explore(kind, *arguments, **state), theme)

    return make
