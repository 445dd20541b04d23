"""Gradients clipped as in one process: by the norm of all of them, or element by element.

With c the greatest norm and n the Euclidean norm over all gradients of the whole model,

    g <- g min(1, c / (n + 1e-6))

The square of n is a sum over ranks, one number in fp64, whatever the gradients are. Each element of
the model counts once, however many ranks hold it: what h ranks hold alike counts 1/h on each.

Source: `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`, whose 1e-6 it is; Pascanu et al.
2013 (arXiv:1211.5063) for the norm.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.comm.all_reduce import all_reduce
from workbench.comm.groups.group import Group

_PART = 2**18  # elements that are made wide at once
_EPS = 1e-6


@dataclass(frozen=True)
class Clipping:
    """What gradients are clipped to.

    Attributes:
        norm: the greatest norm of all gradients together; None: any.
        value: the greatest magnitude of an element; None: any.
        everyone: all ranks.
    """

    norm: float | None
    value: float | None
    everyone: Group

    @torch.no_grad()
    def clip(self, gradients: Mapping[str, Tensor], holders: Mapping[str, int]) -> None:
        """Clips gradients in place; every rank calls it, by norm.

        Args:
            gradients: this rank's, by parameter: pieces, or parts of them, but sums.
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
    """The sum of squares, in fp64."""
    parts = gradient.reshape(-1).split(_PART)
    return (
        torch.stack([torch.linalg.vector_norm(p, dtype=torch.float64) for p in parts])
        .square()
        .sum()
    )
