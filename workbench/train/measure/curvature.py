"""The largest curvature of the loss, measured: Lanczos' method on products with the Hessian.

H v is taken from gradients at two places, (g(w + e v) - g(w - e v)) / 2e, and those from the same
cut model that trains: whatever plan can train can be measured, in the memory of four more copies
of the weights. The gradient is the mean over some batches, with the same dropout at both places.

The largest eigenvalue is asked for, not that of largest magnitude: a network's Hessian at random
weights has negative ones too.

Source: Lanczos 1950 (An iteration method for the solution of the eigenvalue problem), without
orthogonalizing again, which the largest eigenvalue does not need; products from two gradients:
LeCun, Simard and Pearlmutter 1993 (Automatic learning rate maximization by on-line estimation of
the Hessian's eigenvectors).
"""

import math
from pathlib import Path

import torch
from torch import Tensor

from workbench.comm.all_reduce import all_reduce
from workbench.comm.groups.world import RankConfig, World
from workbench.plan.experiment.experiment import Experiment, Synchronous
from workbench.plan.experiment.stability import Curvature
from workbench.plan.placement.placement import Shard
from workbench.train.run.rank import RankState, group_specs_of

Pieces = dict[str, Tensor]

# How far apart the two places are, in lengths of the weights: far enough for the difference to
# be more than rounding, near enough for the loss to be a quadratic in between.
_APART = {torch.float32: 1e-3, torch.float64: 1e-5}


def measure_curvature(
    config: RankConfig,
    experiment: Experiment,
    *,
    weights: Path,
    resume: Path | None = None,
    batches: int = 2,
    iterations: int = 20,
    tolerance: float = 0.02,
) -> Curvature:
    """Measures on one rank; all ranks of the plan call it, and return the same."""
    precision = "fp64" if experiment.precision == "fp64" else "fp32"
    plain = experiment.replace(sync=Synchronous(), shard_optimizer=False, precision=precision)
    with World.open(config) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        state = RankState.start(plain, world, groups, weights, resume)
        value, change = _Hessian(state, batches).largest(iterations, tolerance)
        return Curvature(value, change, state.first_step, batches)


class _Hessian:
    def __init__(self, state: RankState, batches: int) -> None:
        self.state, self.batches = state, batches
        self.parameters = state.model.trainable()
        self.origin = {name: p.detach().clone() for name, p in self.parameters.items()}
        size, placements = state.world.size, state.model.placements
        self.holders = {
            name: size // placements[name].group_size
            if isinstance(placements[name].placement, Shard)
            else size
            for name in self.parameters
        }
        dtype = next(iter(self.origin.values())).dtype
        self.apart = _APART[dtype] * (self.norm(self.origin) or 1.0)

    def largest(self, iterations: int, tolerance: float) -> tuple[float, float]:
        """The largest eigenvalue, and its last relative change."""
        direction = self.gradient(0.0, self.origin)
        before = {name: torch.zeros_like(piece) for name, piece in direction.items()}
        length = self.norm(direction)
        value, change = 0.0, 0.0
        diagonal: list[float] = []
        beside: list[float] = []
        while length > 0 and len(diagonal) < iterations:  # 0: nothing of H is left to see
            direction = {name: piece / length for name, piece in direction.items()}
            turned = self.product(direction)
            diagonal.append(self.inner(direction, turned))
            now = _largest_eigenvalue(diagonal, beside)
            change = abs(now - value) / abs(now) if now else 0.0
            value = now
            if change < tolerance:
                break
            rest = {
                name: piece - diagonal[-1] * direction[name] - (beside or [0.0])[-1] * before[name]
                for name, piece in turned.items()
            }
            before, direction = direction, rest
            length = self.norm(rest)
            beside.append(length)
        return value, change

    def product(self, direction: Pieces) -> Pieces:
        """H times a vector of length 1."""
        ahead = self.gradient(self.apart, direction)
        behind = self.gradient(-self.apart, direction)
        return {name: (ahead[name] - behind[name]) / (2 * self.apart) for name in direction}

    def gradient(self, distance: float, direction: Pieces) -> Pieces:
        """The mean gradient at `distance` along `direction`: this rank's pieces of it."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.origin[name] + distance * direction[name])
        total: Pieces = {}
        for step in range(self.batches):
            self.state.stepper.run(step)
            for name, parameter in self.parameters.items():
                mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                part = mine.detach() / self.batches
                total[name] = total[name] + part if name in total else part
        return total

    def inner(self, left: Pieces, right: Pieces) -> float:
        mine = sum(
            (left[name].double() * right[name].double()).sum().item() / self.holders[name]
            for name in left
        )
        every = all_reduce(torch.tensor([mine]).double(), self.state.everyone, layer="curvature")
        return every.item()

    def norm(self, vector: Pieces) -> float:
        return math.sqrt(self.inner(vector, vector))


def _largest_eigenvalue(diagonal: list[float], beside: list[float]) -> float:
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    lower = torch.tensor(beside, dtype=torch.float64)
    matrix += torch.diag(lower, -1) + torch.diag(lower, 1)
    return torch.linalg.eigvalsh(matrix)[-1].item()
