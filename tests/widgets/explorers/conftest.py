"""What explorers explore."""

import pytest

import workbench as wb
from tests.plan import graphs

MACHINE = wb.Machine.preset("h100-infiniband")


@pytest.fixture(scope="session")
def prediction():
    """Of a small VGG, split over four ranks."""
    return predicted(wb.Plan.hybrid(graphs.vgg(), 4))


def predicted(plan, machine=MACHINE, **fields):
    given = {"batch_size": 64, "optimizer": wb.SGD(lr=0.1, momentum=0.9), "steps": 9, **fields}
    return wb.predict(plan, machine, wb.Experiment(plan=plan, data="digits", **given))


@pytest.fixture
def explore(made):
    """`explore(TimingExplorer, ...)` makes one."""
    return made
