"""Gradients clipped as in one process; and the loss scaled before the backward pass of fp16.

With c the greatest norm and n the Euclidean norm over all gradients of the whole model,

    g <- g min(1, c / (n + 1e-6))

The square of n is a sum over ranks, one number in fp64, whatever the gradients are. Each element of
the model counts once, however many ranks hold it: what h ranks hold alike counts 1/h on each.

With s the scale and g the gradients of s times the loss, summed over the ranks that hold a piece,

    g <- g (1 / s)                               where a rank moves weights by it
    some g on some rank is not finite            nobody moves any; s <- s backoff_factor
    growth_interval updates in a row             s <- s growth_factor, unless that is infinite

Ranks agree on the second by one number in fp64. They keep equal scales without sending them, since
they see the same steps. Scale, reciprocal and count are computed by torch's own kernels, so that
they have the bits of `torch.amp.GradScaler`.

Source: `torch.nn.utils.clip_grad_norm_`, whose 1e-6 it is; Pascanu et al. 2013 (arXiv:1211.5063);
`torch.amp.GradScaler`; Micikevicius et al. 2018 (arXiv:1710.03740).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.comm.all_reduce import all_reduce
from workbench.comm.groups.group import Group
from workbench.plan.experiment.checks import LEAST_SCALE, LossScale

_PART = 2**18  # elements that are made wide at once
_EPS = 1e-6


@dataclass(frozen=True)
class Clipping:
    norm: float | None
    value: float | None
    everyone: Group

    @torch.no_grad()
    def clip(self, gradients: Mapping[str, Tensor], holders: Mapping[str, int]) -> None:
        """Clips gradients in place; every rank calls it, by norm.

        Args:
            holders: how many ranks bring the same elements of each.
        """
        if self.value is not None:
            for gradient in gradients.values():
                gradient.clamp_(-self.value, self.value)
        if self.norm is None:
            return
        squares = [_square(gradient) / holders[name] for name, gradient in gradients.items()]
        mine = torch.stack(squares).sum().cpu() if squares else torch.zeros((), dtype=torch.float64)
        norm = all_reduce(mine.view(1), self.everyone, layer="clip").sqrt()
        factor = float((self.norm / (norm + _EPS)).clamp(max=1.0))
        if factor != 1.0:
            for gradient in gradients.values():
                gradient.mul_(factor)


def _square(gradient: Tensor) -> Tensor:
    parts = gradient.reshape(-1).split(_PART)
    return (
        torch.stack([torch.linalg.vector_norm(p, dtype=torch.float64) for p in parts])
        .square()
        .sum()
    )


class LossScaling:
    """The scale of one rank, the same on all of them.

    Attributes:
        steps: the steps of this session that would have updated weights.
        skipped: those of them that did not, as a gradient was no number.
    """

    def __init__(self, value: LossScale | float, everyone: Group, device: torch.device) -> None:
        self.everyone, self.steps, self.skipped = everyone, 0, 0
        self._follows = value if isinstance(value, LossScale) else None
        first = value.init_scale if isinstance(value, LossScale) else value
        self._scale = torch.full((), first, dtype=torch.float32, device=device)
        self._in_a_row = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def scale(self) -> float:
        return self._scale.item()

    @property
    def is_spent(self) -> bool:
        """Whether the scale has followed the gradients to where it scales nothing any more."""
        return self._follows is not None and self.scale < LEAST_SCALE

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the scale: what a backward pass begins with."""
        return loss * self._scale

    @torch.no_grad()
    def unscale(self, gradients: Sequence[Tensor]) -> bool:
        """Unscales gradients in place; every rank calls it.

        Args:
            gradients: those that this rank moves weights by, summed over the replicas.

        Returns:
            Whether all of them are numbers, on all ranks; the scale of the next step follows.
        """
        found = torch.zeros((), dtype=torch.float32, device=self._scale.device)
        reciprocal = self._scale.double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found, reciprocal)
        bad = all_reduce(found.double().cpu().view(1), self.everyone, layer="unscale").item() > 0
        self.steps, self.skipped = self.steps + 1, self.skipped + bad
        if self._follows is not None:
            torch._amp_update_scale_(
                self._scale,
                self._in_a_row,
                found.fill_(bad),
                self._follows.growth_factor,
                self._follows.backoff_factor,
                self._follows.growth_interval,
            )
        return not bad

    def state(self) -> Tensor:
        """[2] fp64 on the host: the scale, and the updates in a row: what a checkpoint keeps."""
        return torch.tensor([self.scale, self._in_a_row.item()], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Goes on from where `state` was; a scale that stays is the experiment's."""
        if self._follows is not None:
            self._scale.fill_(state[0].item())
            self._in_a_row.fill_(int(state[1].item()))

    @property
    def note(self) -> str:
        """What people should know of this session, if steps were skipped."""
        now = f"it is {self.scale:g} now" if self._follows else f"it stays {self.scale:g}"
        return (
            f"{self.skipped} of {self.steps} steps updated nothing, since gradients overflowed "
            f"fp16 at their loss scale; {now}"
        )
