"""Checks that an operation's backward pass treats every sample by itself, by trying it.

Ranks add up the gradients that their rows give to a weight. That is the gradient of the whole batch
where an operation's backward pass is the derivative of its forward pass. It may be another one: an
`nn.Embedding(scale_grad_by_freq=True)` divides by how often a token is in the batch, and hooks,
`torch.autograd.Function` and functions marked by `torch.fx.wrap` may do anything. So such an
operation runs backward on samples (0, 1, 0, 1), which hold everything twice, and on each half:

    gradient of a weight     the sum of the gradients of the halves
    gradient of a sample     the same as in its half
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from workbench.model.errors import OperationError
from workbench.model.tracing.batch import BATCHES, is_users_function, tensors
from workbench.model.tracing.trials.probe import Probe, Samples, alike, has_rows

_HALF: Samples = (0, 1)
_WHOLE: Samples = _HALF + _HALF


def needs_trial(probe: Probe) -> bool:
    """Whether an operation has weights, or a backward pass that anybody may have written."""
    module = probe.module()
    if module is not None:
        hooked = any(part._backward_hooks or part._backward_pre_hooks for part in module.modules())
        return hooked or any(True for _ in module.parameters())
    read = probe.node.all_input_nodes
    return is_users_function(probe.node.target) or any(_is_weight(probe, n) for n in read)


def _is_weight(probe: Probe, source: Node) -> bool:
    """Whether a value is a parameter, or computed from parameters alone."""
    return not source.meta["depends"] and not probe.traced.varies[source]


def show_backward(probe: Probe, name: str) -> None:
    """Tries the backward pass of a probe's operation.

    Args:
        probe: the operation, which takes batches of two samples and of four.
        name: the operation's name in errors.

    Raises:
        OperationError: a sample's gradient depends on the other samples, or one is sparse.
    """
    towards = [
        probe.traced.noise.values((len(_WHOLE), *_of_one(small)), small.dtype, "normal")
        for small, _ in _differentiable(probe)
    ]
    if not towards:  # truths or whole numbers, such as a comparison with a constant
        return
    whole = _gradients(probe, _WHOLE, towards)
    if any(gradient.layout != torch.strided for gradient in whole.values()):
        raise OperationError(
            probe.node,
            f"{name} has sparse gradients, which are not summed over ranks: build it with "
            "sparse=False",
        )
    first, second = (
        _gradients(probe, _HALF, part)
        for part in zip(*(toward.split(len(_HALF)) for toward in towards), strict=True)
    )
    for key, gradient in whole.items():
        of_samples = isinstance(key, Node)
        parts = first[key], second[key]
        if not alike(gradient, torch.cat(parts) if of_samples else sum(parts), rounded=True):
            which = "a sample" if of_samples else "its weights"
            raise OperationError(
                probe.node,
                f"the backward pass of {name} mixes samples: the gradient of {which} for two "
                "samples is another where the batch has more. Ranks have rows of the batch, and "
                "sum what these give: use a backward pass that treats each sample by itself, as "
                "scale_grad_by_freq=True does not",
            )


def _differentiable(probe: Probe) -> list[tuple[Tensor, Tensor]]:
    """The results that may have a gradient, at both batch sizes."""
    return [pair for pair in probe.leaves() if has_rows(*pair) and _is_real(pair[0])]


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _of_one(small: Tensor) -> tuple[int, ...]:
    """The shape of one sample's rows."""
    return small.shape[0] // BATCHES[0], *small.shape[1:]


def _gradients(
    probe: Probe, samples: Samples, towards: Sequence[Tensor]
) -> dict[Node | str, Tensor]:
    """The gradients of each activation that is read, by its node, and of each weight, by its name.

    Args:
        probe: the operation.
        samples: the samples of the batch.
        towards: the gradient of each of its results, [samples, rows, ...].
    """
    module = probe.module()
    leaves: dict[Node | str, Tensor] = {
        name: weight
        for name, weight in ([] if module is None else module.named_parameters())
        if weight.requires_grad
    }
    given: dict[Node, Tensor] = {}
    for source in probe.node.all_input_nodes:
        value = probe.value(source, samples, 1)
        learns = source.meta["depends"] or _is_weight(probe, source)
        if learns and isinstance(value, Tensor) and _is_real(value):
            leaf = value.detach().clone().requires_grad_()
            leaves[source if source.meta["depends"] else source.name] = leaf
            given[source] = leaf
    with torch.enable_grad():
        # A copy: the operation may change what it reads in place.
        copies = {source: leaf.clone() for source, leaf in given.items()}
        results = tensors(probe.run(probe.node, samples, copies))
        pairs = zip(results, probe.leaves(), strict=True)
        found = [r for r, pair in pairs if has_rows(*pair) and _is_real(pair[0])]
        back = [
            (result, toward.flatten(0, 1))
            for result, toward in zip(found, towards, strict=True)
            if result.requires_grad
        ]
        if not back:
            return {}
        made = torch.autograd.grad(
            [result for result, _ in back],
            list(leaves.values()),
            [toward for _, toward in back],
            allow_unused=True,
        )
    return {key: g for key, g in zip(leaves, made, strict=True) if g is not None}
