"""Predicted against measured peaks: for a machine that knows its kernels, and without one.

On GPUs, whose bands are other than those of CPUs, without one means: with the GPUs as they are
before their kernels are measured.
"""

from collections.abc import Sequence
from functools import cached_property

from workbench.bench.predict.cases import Case
from workbench.bench.predict.stepping import Observed
from workbench.bench.report import Cell, Figure
from workbench.client.calibration.devices import unmeasured, with_workspaces
from workbench.client.cluster import Cluster
from workbench.client.leases import lent
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.machine.machine import Machine
from workbench.predict.prediction import Prediction, predict

MIB = 2**20
_TASK = "workbench.train.measure.device:workspaces"
_DEVICES_S = 2.0
# Its speeds do not matter here.
_ON_ONE_HOST = Machine.preset("cpu-10gbe").replace(ranks_per_host=None, across=None)


class KernelMachines:
    """Machines of which only that is measured what kernels take beside their tensors.

    Args:
        cluster: the cluster whose engines measure.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[int, Machine] = {}

    def of(self, experiment: Experiment) -> Machine:
        """The machine for an experiment, measured unless it is known.

        Raises:
            RunError: a rank failed.
        """
        world = experiment.plan.world_size
        machine = self._known.get(world) or self.bare or _ON_ONE_HOST
        rows = _most_rows(experiment)
        if unmeasured(machine.devices, experiment, (rows,)):
            with lent(self._cluster, experiment.plan, "a calibration") as lease:
                found = lease.call(_TASK, experiment, {"rows": (rows,)})
            machine = machine.replace(devices=with_workspaces(machine.devices, found))
            self._known[world] = machine
        return machine

    @cached_property
    def bare(self) -> Machine | None:
        """The machine before its kernels are measured; None: it has CPUs alone."""
        if all(device.kind == "cpu" for device in self._cluster.devices):
            return None
        return self._cluster.calibrate(within_s=_DEVICES_S, keep=False)


def _most_rows(experiment: Experiment) -> int:
    """The rows of the rank that has most, in the largest micro-batch."""
    batch = -(-experiment.batch_size // experiment.accumulate)
    return max(experiment.plan.rows_of(batch))


def memory_cells(
    case: Case, prediction: Prediction, bare: Machine | None, found: Sequence[Observed]
) -> dict[str, Cell]:
    """The peak of the rank that is furthest off, and whether it lies in the band without a machine.

    Args:
        case: the case.
        prediction: the prediction for a machine that knows its kernels.
        bare: a machine that does not; None: any CPU.
        found: the workspaces that each rank measured.
    """
    memory, experiment = prediction.memory, case.experiment
    errors = [abs(memory[rank].peak_bytes / seen.peak_bytes - 1) for rank, seen in enumerate(found)]
    rank = max(range(len(errors)), key=errors.__getitem__)
    guessed = predict(experiment.plan, bare, experiment).memory
    bands = [guessed[rank].band for rank in range(len(found))]
    inside = [
        least <= seen.peak_bytes <= most for (least, most), seen in zip(bands, found, strict=True)
    ]
    return {
        "model": experiment.plan.graph.source.name,
        "plan": case.plan,
        "optimizer": experiment.optimizer.kind,
        "precision": experiment.precision,
        "measured MiB": found[rank].peak_bytes / MIB,
        "predicted MiB": memory[rank].peak_bytes / MIB,
        "memory error": errors[rank],
        "without machine MiB": guessed[rank].peak_bytes / MIB,
        "least MiB": bands[rank][0] / MIB,
        "most MiB": bands[rank][1] / MIB,
        "in band": "yes" if all(inside) else "NO",
        "when": str(memory[rank].moment),
    }


def memory_figures(rows: Sequence[dict[str, Cell]]) -> dict[str, Figure]:
    """The errors with a machine, and how often the measured peak lies in the band without one."""
    errors = [float(row["memory error"]) for row in rows]
    worst = max(errors)
    return {
        "memory_error_median": Figure.of(errors),
        "memory_error_worst": Figure(worst, worst, worst),
        "memory_in_band": Figure.of([float(row["in band"] == "yes") for row in rows]),
        "memory_band": Figure.of(
            [float(row["most MiB"]) / float(row["least MiB"]) - 1 for row in rows]
        ),
    }
