"""What stands for a value in a module's forward while it is traced."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import Proxy
from torch.fx.proxy import Attribute

from workbench.model import assigned
from workbench.model.batch import tensors
from workbench.model.errors import TraceError


class ValueProxy(Proxy):
    """A proxy that knows its value at two batch sizes."""

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TraceError(
            "assigning to a part of a tensor is not recorded: use torch.where or torch.cat, or "
            "put the lines into a function marked by torch.fx.wrap"
        )

    def __getattr__(self, k: str) -> Any:
        if callable(getattr(self.node.meta["values"][0], k)):
            return Attribute(self, k)
        return self.tracer.create_proxy("call_function", getattr, (self, k), {})

    def __getitem__(self, index: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.getitem, (self, index), {})

    def __iadd__(self, other: Any) -> Any:
        return self._in_place(operator.add, assigned.add, other)

    def __isub__(self, other: Any) -> Any:
        return self._in_place(operator.sub, assigned.sub, other)

    def __imul__(self, other: Any) -> Any:
        return self._in_place(operator.mul, assigned.mul, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._in_place(operator.truediv, assigned.truediv, other)

    def _in_place(
        self, of_numbers: Callable[..., Any], of_tensors: Callable[..., Any], other: Any
    ) -> Any:
        """Records `x += y` as x + y in the type of x, which x is from here on, by every name."""
        changes = bool(tensors(self.node.meta["values"][0]))
        function = of_tensors if changes else of_numbers
        result = self.tracer.create_proxy("call_function", function, (self, other), {})
        if isinstance(result, Proxy):
            result.node.meta["in_place"] = changes
        return result

    def __len__(self) -> int:
        first, second = self.node.meta["values"]
        if len(first) != len(second):
            raise TraceError(
                "len() or a loop over the batch: use x.shape[0] for the number of rows, and "
                "operations on all rows at once instead of a loop"
            )
        return len(first)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))
