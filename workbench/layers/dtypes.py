"""The types of what a model's layers give, as one process would have them.

A rank that has nothing of a layer does not run it, and yet has to give on what the others do: under
autocast the type of a result is that of the operation, not that of what it reads. So the whole
model runs once on fake tensors, without memory, under the autocast that is in force.
"""

from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from workbench.model.structure import with_tensors

_ROWS = 2  # batch norm wants more than one

Autocast = tuple[bool, torch.dtype]


class Dtypes:
    """Of a traced model.

    Args:
        traced: the model, whole and without values; it may be rewritten afterwards.
        input_shape: of one sample.
        device: on which the model computes.
        dtype: of images and of floating-point weights.
    """

    def __init__(
        self,
        traced: torch.fx.GraphModule,
        input_shape: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._mode, self._device = FakeTensorMode(), device

        def fake(tensor: Tensor) -> Tensor:
            wanted = dtype if tensor.is_floating_point() else tensor.dtype
            with self._mode:
                return torch.empty(tensor.shape, dtype=wanted, device=device)

        self._whole = with_tensors(traced, fake)
        for module in self._whole.modules():
            if isinstance(module, _BatchNorm) and module.momentum is None:
                module.momentum = 1.0  # a cumulative one reads its count of batches, a value
        self._images = fake(torch.empty(_ROWS, *input_shape, device="meta"))
        self._known: dict[Autocast, dict[str, torch.dtype]] = {}

    def of(self, node: str) -> torch.dtype:
        """Of what a node of the traced model gives, under the autocast in force."""
        kind = self._device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        if autocast not in self._known:
            noting = _Noting(self._whole)
            with self._mode, torch.no_grad():
                noting.run(self._images.clone())
            self._known[autocast] = noting.found
        return self._known[autocast][node]


class _Noting(torch.fx.Interpreter):
    """Notes the type of every tensor that a node gives."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.found: dict[str, torch.dtype] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.found[n.name] = value.dtype
        return value
