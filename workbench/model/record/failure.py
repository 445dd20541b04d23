"""The error for a model that cannot be traced: the line, the reason, and a remedy."""

import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from workbench.model.errors import TraceError
from workbench.model.record.batch import BATCHES

_WRAP = (
    "put the lines into a function marked by torch.fx.wrap: it is then one operation, "
    "recorded as it is"
)
_REMEDIES = {
    r"predicate to be bool|integer and Boolean-type|\"bitwise_\w+\" not implemented for": (
        'If this is an input, it is declared as a number: declare a mask as wb.Input(shape, "bool")'
    ),
    r"\b[Ii]nd(ex|ices)\b.*\b(long\b|Long|int64)|(long|int64)\b.* for index": (
        "If this is an input, it is declared as real numbers: give vocabulary= to wb.trace or to "
        'the wb.Input; a mask is wb.Input(shape, "bool")'
    ),
    r"_pack_padded_sequence": (
        "It needs the lengths, which are known only when the model runs. Give the layer the padded "
        "sequences, since a step does not depend on later ones, and read the last step of each: "
        "y[torch.arange(len(y)), lengths - 1]. To read a sequence backwards, reverse its steps "
        "with torch.gather and use a second layer"
    ),
    r"is not an instance of torch.Tensor": (
        "torch.func.functional_call cannot be recorded: call the layer's function with the "
        "weights, F.linear(x, weight, bias), or use nn.utils.parametrize.register_parametrization"
    ),
    r"^vmap": f"Instead, {_WRAP}",
}
"""Remedies by a pattern of torch's own message."""
# What torch says of a tensor that was traced, where another trace meets it.
_MIXING = "Mixing fake modes"
OF_ANOTHER_TRACE = (
    "it uses a value of another trace, of training or of an earlier call of wb.trace: a function "
    "that remembers what it gave (functools.lru_cache), a global dict or an attribute holds it. "
    "Build it in __init__, self.register_buffer('mask', mask), or anew in every call; and empty "
    "what holds it now (f.cache_clear()), without which the model does not run in plain torch, "
    "either"
)
MAX_NORM = (
    "rows of its table in forward, since max_norm is set: leave max_norm out, and scale what is "
    "looked up, y / (y.norm(dim=-1, keepdim=True) / max_norm).clamp(min=1)"
)
_NOT_THE_USERS = tuple(
    str(Path(folder)) + os.sep
    for folder in (
        Path(torch.__file__).parent,
        Path(__file__).parents[1],
        sysconfig.get_path("stdlib"),
    )
)


_IS_OF_DISTRIBUTIONS = re.compile(r"[\\/]torch[\\/]distributions[\\/]").search
_OF_DISTRIBUTIONS = (
    ". torch.distributions decides on its arguments' values and sizes in Python: draw from one by "
    "operations of tensors, as mean + deviation * torch.randn_like(deviation) from a normal one"
)

Place = tuple[CodeType, int]


class Refused(NamedTuple):
    """The first error of a trace, and the path of the submodule that it was in."""

    error: TraceError
    path: str | None


def noted(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a tracer that keeps the first `TraceError`, as `refused`.

    The model's own code may catch it, and would be recorded as it goes on: not as it does when it
    runs, where nothing is raised.
    """

    @wraps(method)
    def keeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except TraceError as error:
            self.refused = self.refused or Refused(error, str(self.scope.module_path) or None)
            raise

    return keeping


def explained(
    error: Exception, model: str, module: str | None, line: Place | None = None
) -> TraceError:
    """The error to raise instead of `error`, which was raised during tracing."""
    place = f" in {module!r}" if module else ""
    hint = _OF_DISTRIBUTIONS if _in_distributions(error) else ""
    found = _shown(*line) if line else _line_of_user(error)
    shown = f"\n  {found}" if found else ""
    return TraceError(f"{model} cannot be traced{place}: {_reason(error)}{hint}{shown}")


def _in_distributions(error: Exception) -> bool:
    """Whether it is of torch.distributions, or of what these ask of their arguments."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return "_is_all_true" in str(error) or any(map(_IS_OF_DISTRIBUTIONS, files))


def _reason(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    for pattern, remedy in _REMEDIES.items():
        if re.search(pattern, text):
            return f"{text.rstrip('.')}. {remedy}"
    if isinstance(error, TraceError):
        return text
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return (
            f"what follows depends on the values of a tensor ({text}), which are known only when "
            "it runs, also in a function marked by torch.fx.wrap: use torch.where or a mask instead"
        )
    if isinstance(error, AssertionError) and text.startswith(_MIXING):
        return OF_ANOTHER_TRACE
    if isinstance(error, TypeError):
        return (
            f"TypeError: {text}. Instead of a loop over the batch, use operations on all rows at "
            "once. If it has a size that depends on the batch: x.new_zeros((n, 3)) follows x; else "
            f"{_WRAP}"
        )
    if isinstance(error, RuntimeError):
        few, many = BATCHES
        return (
            f"an operation fails with a batch of {few} or of {many} samples ({text}), and the "
            "model has to run with any number of them: give each sample its own shape, "
            "x.reshape(len(x), ...), and see that it runs in plain torch"
        )
    return f"{type(error).__name__}: {text}"


def is_users(path: str) -> bool:
    """Whether a file's code is the model's own, not Python's, torch's or the library's."""
    if "site-packages" not in path and path.startswith(_NOT_THE_USERS[2]):
        return False
    return not path.startswith((*_NOT_THE_USERS[:2], "<frozen"))


def _line_of_user(error: Exception) -> str:
    """The last line of the model's own code in the error's traceback."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        if is_users(frame.f_code.co_filename):
            return _shown(frame.f_code, number)
    return ""


def _shown(code: CodeType, number: int) -> str:
    text = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_filename}:{number}, in {code.co_name}: {text}"
