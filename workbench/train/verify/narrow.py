"""Whether a model computes in fp32 by itself, where all is to be in fp64.

Some norms of language models cast what they read to fp32, and their weights with it, whatever the
model's precision: then the gradient of such a weight is a sum in fp32, and depends on the order of
the rows. No split can be expected to be nearer than another order is.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class NarrowWatch(TorchFunctionMode):
    """Looks on while a model computes in fp64.

    Attributes:
        found: whether something with a gradient was of a narrower type.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.found:
            made = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
            self.found = any(one.dtype in _NARROW and one.requires_grad for one in made)
        return result
