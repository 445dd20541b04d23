"""The proxies of values in a module's forward while it is traced, reshapes and decisions.

Reshapes are recorded with explicit sizes, so that they also work on a batch without rows:
`x.view(-1, 512)` and the like after a convolution become `torch.flatten(x, 1)`, which means the
same for a tensor whose channels are sharded.

One process decides on the batch of a whole step, and ranks have few rows of it, or none. So a
decision that is the same for all batches from two samples on may be recorded as it was made; where
it is another one for a single sample, a run with such a batch is refused.
"""

import dis
import math
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import Attribute
from torch.utils import _pytree as pytree

from workbench.model.record.batch import called, shape_for, tensors
from workbench.model.record.failure import is_users
from workbench.model.record.in_place import SETITEM, Assigned

_OWN = ("node", "tracer")
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")
_OF_GRADIENTS = {*_HOOKS, "requires_grad", "grad_fn", "is_leaf", "grad", "retains_grad"}
# Functions of torch's own, in Python, that ask for a type in the name of who calls them.
_ASKING = {
    torch.is_tensor.__code__,
    type(nn.Parameter).__instancecheck__.__code__,
    nn.Module.get_parameter.__code__,
}


class ValueProxy(Proxy):
    """A proxy that knows its value at two batch sizes."""

    __array_ufunc__ = None  # NumPy leaves np.sqrt(8) * x to x

    def __setitem__(self, index: Any, value: Any) -> None:
        """Records `x[index] = y` as a new tensor, which replaces x under every name."""
        given = (self, index, value)
        result = self.tracer.create_proxy("call_function", SETITEM, given, {})
        result.node.meta["in_place"] = True

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The type of the value, where the model's own code asks by isinstance; else the proxy's.

        Only there is it safe: torch, told that this is a tensor, would read memory that it is not.
        """
        if not _is_asked(sys._getframe(1)):
            return ValueProxy
        value = self.node.meta["values"][0]
        if isinstance(value, Tensor):
            return nn.Parameter if isinstance(value, nn.Parameter) else Tensor
        return type(value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets what a proxy itself has; an attribute of its tensor would be lost."""
        if name in _OWN or name.startswith("_"):
            return super().__setattr__(name, value)
        return self._refuse(
            f"the assignment to {self.node.name}.{name} would be lost, since a graph holds "
            "operations alone: compute another tensor and use that, w = constrain(self.weight); "
            "F.linear(x, w)"
        )

    def __getattr__(self, k: str) -> Any:
        value = getattr(self.node.meta["values"][0], k)
        if k in _OF_GRADIENTS and is_users(sys._getframe(1).f_code.co_filename):
            self._refuse_of_gradients(k)
        if k == "requires_grad_" and isinstance(self.node.meta["values"][0], nn.Parameter):
            self._refuse(
                f"forward says whether {str(self.node.target)!r} is trained, by requires_grad_: "
                "say so before it is traced"
            )
        if callable(value):
            return Attribute(self, k)
        return self.tracer.create_proxy("call_function", getattr, (self, k), {})

    def _refuse_of_gradients(self, name: str) -> None:
        """Refuses what is another thing while a model is traced, where no gradient is recorded."""
        if name in _HOOKS:
            self._refuse(
                f"{self.node.name}.{name} would be lost, since a graph holds operations alone: let "
                "forward scale a gradient, 0.1 * x + (0.9 * x).detach(), or register a full "
                "backward hook on a layer"
            )
        if self.node.op not in ("get_attr", "placeholder") or name in ("grad", "retains_grad"):
            self._refuse(
                f"forward reads {self.node.name}.{name}, which a graph cannot know, since no "
                "gradient is recorded while it is traced: decide by self.training instead"
            )

    def __getitem__(self, index: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.getitem, (self, index), {})

    def _in_place(self, function: Callable[..., Any], other: Any) -> Any:
        """Records `x += y` as x + y in the type of x, which replaces x under every name."""
        changes = bool(tensors(self.node.meta["values"][0]))
        target = Assigned(function) if changes else function
        result = self.tracer.create_proxy("call_function", target, (self, other), {})
        if isinstance(result, Proxy):
            result.node.meta["in_place"] = changes
        return result

    def __float__(self) -> float:
        return float(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def __complex__(self) -> complex:
        return complex(self._number())

    def _number(self) -> Any:
        return self._refuse(
            "a number of Python's is made (float, int) of what depends on the values or "
            "the size of the batch: use operations of tensors; if of the size alone, put the lines "
            "into a function marked by torch.fx.wrap"
        )

    def _refuse(self, text: str) -> Any:
        """Raises a `TraceError`, which is raised even where the model catches it."""
        return cast(Any, self.tracer).refuse(text)

    def __len__(self) -> int:
        first, second = self.node.meta["values"]
        if len(first) != len(second):
            self._refuse(
                "a loop over the batch: use operations on all rows at once instead of a loop"
            )
        return len(first)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(self.__len__()))

    @property
    def length(self) -> Any:
        """What `len` gives: of rows that follow the batch, their recorded number."""
        first, second = self.node.meta["values"]
        rows = isinstance(first, Tensor) and first.ndim > 0 and len(first) != len(second)
        return self.shape[0] if rows else self.__len__()


def _changing(function: Callable[..., Any]) -> Callable[[ValueProxy, Any], Any]:
    return lambda proxy, other: proxy._in_place(function, other)


for _function in (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv),
    *(operator.mod, operator.pow, operator.and_, operator.or_, operator.xor),
    *(operator.lshift, operator.rshift),
):
    setattr(ValueProxy, f"__i{_function.__name__.strip('_')}__", _changing(_function))


class Sizes(tuple[Any, ...]):
    """A tensor's shape of which some numbers depend on the batch, which torch.Size cannot hold."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Torch's type of shapes, where the model's own code asks by isinstance; else its own."""
        return torch.Size if _is_asked(sys._getframe(1)) else Sizes

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        return _sized(part) if isinstance(index, slice) else part

    def __add__(self, other: Any) -> Any:
        return _sized(super().__add__(other))

    def numel(self) -> Any:
        """The product of the sizes."""
        return math.prod(self)


def _sized(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    known = all(type(size) is int for size in sizes)
    return torch.Size(sizes) if known else Sizes(sizes)


def _is_asked(frame: FrameType | None) -> bool:
    """Whether the model's own code asks for a type, itself or by torch's functions for that."""
    for_another = False
    while frame is not None and frame.f_code in _ASKING:
        frame, for_another = frame.f_back, True
    if frame is None or not is_users(frame.f_code.co_filename):
        return False
    return for_another or _asks_for_type(frame.f_code, frame.f_lasti)


@cache
def _asks_for_type(code: CodeType, at: int) -> bool:
    """Whether the instruction at this offset calls isinstance, or reads `__class__`.

    The call begins where the name does that is called.
    """
    instructions = list(dis.get_instructions(code))
    call = next((one for one in instructions if one.offset == at), None)
    if call is None or call.argval == "__class__":
        return call is not None
    if call.positions is None or call.positions.lineno is None:
        return False
    return any(
        one.argval == "isinstance" and one.positions and one.positions[::2] == call.positions[::2]
        for one in instructions
    )


def is_reshape(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call changes a tensor's sizes; `view` with a dtype changes its type instead."""
    if target not in ("view", "reshape", torch.reshape) or kwargs or len(args) < 2:
        return False
    return isinstance(args[0], Node) and not isinstance(args[1], torch.dtype)


def stated(
    target: Any, args: tuple[Any, ...], after: Tensor, of_another: Tensor
) -> tuple[str, Any, tuple[Any, ...]]:
    """The same operation with explicit sizes, as kind, target and arguments of a node."""
    source: Node = args[0]
    before = source.meta["values"][0]
    features = math.prod(before.shape[1:])
    if source.meta["depends"] and before.ndim > 2 and after.shape == (len(before), features):
        return "call_function", torch.flatten, (source, 1)
    sizes = [
        length if size == -1 and length == other else size
        for size, length, other in zip(_sizes(args), after.shape, of_another.shape, strict=True)
    ]
    return "call_method", "view" if target == "view" else "reshape", (source, *sizes)


def _sizes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sizes, which are given one by one or in one list."""
    return tuple(args[1]) if isinstance(args[1], list | tuple) else args[1:]


_TRIED = (*range(2, 66), 100, 127, 128, 255, 256, 1000, 1023, 1024, 4096, 65_536, 1_000_003)


@dataclass(frozen=True)
class Decision:
    """A decision that is the same for all batches of `least_batch` samples or more."""

    value: bool
    least_batch: int


def decided_alike(node: Node) -> Decision | None:
    """The decision that a value stands for, if it follows from the batch size alone; else None.

    It is taken for the sizes up to 65, and some large ones, around powers of two and ten.
    """
    if tensors(node.meta["values"][0]):
        return None
    try:
        found = {bool(_at(node, count)) for count in _TRIED}
        alone = bool(_at(node, 1))
    except Exception:  # whatever the numbers of the user's are not made for
        return None
    if len(found) > 1:
        return None
    (value,) = found
    return Decision(value, 1 if alone == value else 2)


def _at(node: Node, count: int) -> Any:
    """A value that is no tensor, for a batch of so many samples."""
    arguments = map_arg((node.args, node.kwargs), lambda source: _hollow(source, count))
    return called(node.op, node.target, nn.Module(), *arguments)


def _hollow(node: Node, count: int) -> Any:
    small, large = node.meta["values"]
    if not tensors(small):
        return _at(node, count)
    others = iter(tensors(large))

    def hollow(tensor: Tensor) -> Tensor:
        shape = shape_for((tensor, next(others)), count)
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    return pytree.tree_map_only(Tensor, hollow, small)
