"""What kernels take beside their tensors: exact where it was measured, on lines between."""

import pytest

from tests.plan.machines import device, work
from workbench.plan.io.errors import MachineError
from workbench.plan.machine.machine import Machine
from workbench.plan.machine.work import Needed, Workspace

KEY = "linear Linear 4 > 4"
KNOWN = Workspace(key=KEY, precision="fp32", points=((1, 0, 10, 100), (4, 30, 10, 160)))


@pytest.mark.parametrize(
    ("rows", "needed"),
    [
        (0, Needed(0, 0, 0)),
        (1, Needed(0, 10, 100)),
        (2, Needed(10, 10, 120)),
        (4, Needed(30, 10, 160)),
        (5, None),
    ],
)
def test_between_measured_rows_it_lies_on_lines_and_is_not_known_beyond(rows, needed):
    assert KNOWN.at(rows) == needed


def test_a_device_knows_the_shapes_that_it_measured_in_their_precision():
    known = device(workspaces=(KNOWN,))
    assert known.workspace(work(4, key=KEY)) == Needed(30, 10, 160)
    assert known.workspace(work(4, key=KEY, precision="bf16")) is None
    assert known.workspace(work(4, key="linear Linear 5 > 4")) is None


def test_rows_ascend():
    with pytest.raises(MachineError, match="ascending order of rows"):
        KNOWN.replace(points=KNOWN.points[::-1])


def test_a_machine_keeps_them_as_text():
    first = Machine.preset("cpu-10gbe")
    machine = first.replace(devices=(first.devices[0].replace(workspaces=(KNOWN,)),))
    assert Machine.from_toml(machine.to_toml()) == machine
    assert machine.to_frame()["workspaces"][0] == 1
