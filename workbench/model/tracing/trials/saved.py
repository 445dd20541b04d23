"""Finds what autograd saves of an operation, by looking on while it runs on fake tensors.

A saved tensor is told by its memory: that of an input or of the output is there anyway, that of
the model's own parameters and buffers always is, and all other is new.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.model.tracing.batch import tensors
from workbench.plan.graph.saved import Saved


def watched(
    call: Callable[[], Any], given: Sequence[Any], held: frozenset[int]
) -> tuple[Any, Saved]:
    """Runs an operation; returns its result and what autograd has saved of it.

    Args:
        call: a function that runs it.
        given: the values that it reads, in the order of its layer's inputs.
        held: the memory of the model's parameters and buffers (`memory_of`).
    """
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    # Before it runs: an operation may change what it reads in place.
    read = [memory_of(tensors(value)) for value in given]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = call()
    made = tensors(result)
    of_result, saved = memory_of(made), memory_of(kept)
    first = next((memory for memory in read if memory), frozenset[int]())
    view = bool(of_result) and of_result <= first
    there = frozenset().union(*read, of_result, held)
    new = {_memory(tensor): tensor for tensor in kept if _memory(tensor) not in there}
    elements = sum(tensor.numel() for tensor in made)
    types = {tensor.dtype for tensor in made}
    # Smaller ones are statistics, which stay in full precision where autocast is on.
    alike = [t for t in new.values() if t.dtype in types and t.numel() >= elements]
    words = sum(tensor.numel() for tensor in alike)
    others = sum(tensor.nbytes for tensor in new.values()) - sum(t.nbytes for t in alike)
    return result, Saved(
        inputs=tuple(place for place, memory in enumerate(read) if memory & (saved - held)),
        output=not view and bool(saved & of_result),
        view=view,
        words=words / max(elements, 1),
        bytes=others / max(elements, 1),
    )


def peaks(call: Callable[[], Any], given: Sequence[Any]) -> tuple[float, float]:
    """The most that an operation takes beside what stays, forward and backward.

    Elements for each element of its output. Its output and what is saved stay, and the gradients
    that it gives.

    Args:
        call: a function that runs it on fake tensors.
        given: the values that it reads.
    """
    with _NewMemory() as forward:
        result = call()
        taken = forward.most - forward.alive
    made = [tensor for tensor in tensors(result) if tensor.requires_grad]
    wanted = [tensor for value in given for tensor in tensors(value) if tensor.requires_grad]
    given_bytes = max(sum(tensor.nbytes for tensor in tensors(result)), 1)
    if not made or not wanted:
        return taken / given_bytes, 0.0
    starts = [torch.ones_like(tensor) for tensor in made]
    with _NewMemory() as backward:
        gradients = torch.autograd.grad(made, wanted, starts, allow_unused=True)
        back = backward.most - backward.alive
    del gradients
    return taken / given_bytes, back / given_bytes


class _NewMemory(TorchDispatchMode):
    """Looks on which memory is made.

    Attributes:
        alive: the bytes made since it began that are still alive.
        most: the most that there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def alive(self) -> int:
        return sum(size for made, size in self._made.values() if not made.expired())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        read = memory_of(tensors((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        for tensor in tensors(result):
            if _memory(tensor) not in read:
                storage = tensor.untyped_storage()
                self._made[_memory(tensor)] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.alive)
        return result


def memory_of(these: Iterable[Tensor]) -> frozenset[int]:
    """The memory of tensors, a number for each that is shared with no other."""
    return frozenset(map(_memory, these))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
