"""A module without its values: the same classes, names and shapes, and no memory for tensors.

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
    return with_tensors(module, without_values).train()


def with_tensors(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """A deep copy of `module` in which each tensor is what `make` gives for it.

    Tensors used twice stay one. Parameters that need no gradient become buffers of the same
    name: they are held, saved and moved like buffers.
    """
    memo: dict[int, object] = {}
    for tensor in _tensors(module):
        if id(tensor) not in memo:
            made = make(tensor)
            trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
            memo[id(tensor)] = nn.Parameter(made) if trained else made
    try:
        made_module = copy.deepcopy(module, memo)
    except Exception as error:
        raise TraceError(f"{type(module).__name__} cannot be copied: {error}") from error
    for owner in made_module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None and not isinstance(parameter, nn.Parameter):
                del owner._parameters[name]
                owner.register_buffer(name, parameter)
    return made_module


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers, vars(owner)):
            yield from (value for value in table.values() if isinstance(value, Tensor))
