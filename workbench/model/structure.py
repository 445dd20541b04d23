"""A module without its values: the same classes, names and shapes, and no memory for tensors.

Parameters stay parameters, whether they require a gradient or not. The copy is in training mode,
but for the parts that stay in eval mode while the model trains: those that `train()` puts there,
and, in a module that is given in training mode, those that are there already.

Tensors of the copy lie on torch's meta device. Floating-point ones are float32, whatever
precision the module was given in: precision belongs to the experiment, not to the model.
"""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from workbench.model.errors import TraceError


def structure(module: nn.Module) -> nn.Module:
    """A copy of `module` for training, without values; the module itself is left as it is.

    Raises:
        TraceError: it has parameters without a shape yet, or something that cannot be copied.
    """

    def without_values(tensor: Tensor) -> Tensor:
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=dtype, device="meta")

    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise TraceError(
                f"{name!r} of {type(module).__name__} has no shape yet; "
                "run the module once on a batch, so that its lazy layers know their sizes"
            )
    evaluating = [path for path, part in module.named_modules() if not part.training]
    made = with_tensors(module, without_values).train()
    for path in evaluating if module.training else ():
        made.get_submodule(path).training = False
    return made


def with_tensors(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """A deep copy of `module` in which each tensor is what `make` gives for it.

    Tensors used twice stay one. Parameters require a gradient where they did.
    """
    memo: dict[int, object] = {}
    for tensor in _tensors(module):
        if id(tensor) not in memo:
            made = make(tensor)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = made
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise TraceError(f"{type(module).__name__} cannot be copied: {error}") from error


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers, vars(owner)):
            yield from (value for value in table.values() if isinstance(value, Tensor))
