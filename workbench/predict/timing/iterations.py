"""How long an iteration takes, by what overlaps with what, in closed form.

With l_up, l_for and l_back the times of update, forward and backward pass, l_comp = l_for + l_back,
and l_comm that of exchanging the gradient:

    D-Sync, PS-Sync            l_up + l_comp + l_comm
    D-Sync, L overlapped calls l_up + l_for + max(l_back + l_comm/L, l_back/L + l_comm)
    Pipe-SGD                   max(l_up + l_comp, l_comm), of any width K >= 2
    Pipe-SGD, no limits        (l_up + l_comp + l_comm) / K

Source: Pipe-SGD (Li et al. 2018, arXiv:1811.03619), sec. 4, of which only the abstract was
available to us: D-Sync and Pipe-SGD are recalled, the limit of one compute unit and one network is
also derived, as its throughput. The overlapped calls are derived: L equal parts that pass two
stages, backward and network, one after another.
"""

from dataclasses import dataclass

from workbench.plan.errors import MachineError


@dataclass(frozen=True)
class Compute:
    """What a worker does in an iteration besides communicating.

    Attributes:
        update_s: l_up.
        forward_s: l_for, loading included.
        backward_s: l_back.

    Raises:
        MachineError: a negative time, or none at all.
    """

    update_s: float
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        if min(self.update_s, self.forward_s, self.backward_s) < 0 or self.seconds <= 0:
            raise MachineError(f"times of an iteration are positive, got {self}")

    @property
    def seconds(self) -> float:
        """l_up + l_comp."""
        return self.update_s + self.forward_s + self.backward_s


def synchronous_s(compute: Compute, communication_s: float, calls: int = 1) -> float:
    """Of D-Sync and PS-Sync; the gradient travels in `calls` equal parts while backward goes on."""
    ready = max(
        compute.backward_s + communication_s / calls, compute.backward_s / calls + communication_s
    )
    return compute.update_s + compute.forward_s + ready


def pipelined_s(compute: Compute, communication_s: float) -> float:
    """Of Pipe-SGD with one compute unit and one network: the slower of them never waits.

    Two iterations in flight keep it busy, so that no width above 2 is faster.
    """
    return max(compute.seconds, communication_s)


def unlimited_s(compute: Compute, communication_s: float, width: int) -> float:
    """Of Pipe-SGD with as many compute units and networks as there are iterations in flight."""
    return (compute.seconds + communication_s) / width


def pipelined_total_s(compute: Compute, communication_s: float, iterations: int) -> float:
    """Of a whole run, from the first iteration's beginning to its last gradient's arrival.

    The pipeline fills in the first iteration and drains after the last.
    """
    steady = pipelined_s(compute, communication_s)
    return compute.seconds + communication_s + (iterations - 1) * steady


def ratio_r(compute: Compute, communication_s: float) -> float:
    """l_comm / (l_up + l_comp): below 1 a pipeline is bound by compute, above by the network."""
    return communication_s / compute.seconds


def gain_bound(r: float) -> float:
    """(1 + r) / max(1, r): how much faster than D-Sync the same exchange in a pipeline can be.

    At most 2, at r = 1. More can only come from a smaller l_comm, by a codec, or from comparing
    with another exchange. Derived.
    """
    return (1 + r) / max(1.0, r)
