"""Refuses modules with what their traced copy would lose or could not hold."""

import sys
from collections.abc import Iterator
from types import CodeType

import torch
from torch import nn

from workbench.model.errors import InsideError, TraceError
from workbench.model.tracing.failure import Place, is_users

# Properties of torch.fx.GraphModule, which would hide submodules of these names.
_HIDING = {"code", "graph"}
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def refuse_what_is_lost(model: nn.Module) -> None:
    """Checks that a traced copy computes what the model does.

    Raises:
        TraceError: it would not; the text says which part of the model, and what to do.
    """
    for said in _lost(model):
        raise TraceError(f"{type(model).__name__} cannot be traced: {said}")


def refuse_backward_hooks(part: nn.Module, path: str) -> None:
    """Checks that a module whose parts become layers of their own has no hooks on its gradient.

    A module that is one layer keeps its own.

    Raises:
        TraceError: it has some.
    """
    if part._backward_hooks or part._backward_pre_hooks:
        raise TraceError(
            f"the backward hooks of {path!r} would be lost, since its parts are layers of their "
            "own: put them on these parts (a single nn.Linear or nn.Conv2d), or let forward scale "
            "the gradient, 0.1 * x + (0.9 * x).detach()"
        )


def _lost(model: nn.Module) -> Iterator[str]:
    for path, part in model.named_modules():
        of = f"of {path!r}" if path else "of the model itself"
        if names := _WRAPPERS & {cls.__name__ for cls in type(part).__mro__}:
            yield (
                f"{names.pop()} wraps {of.removeprefix('of ')}, and a plan decides what each rank "
                "holds: give the module inside, model.module, or for FSDP the one before wrapping"
            )
        if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
            yield (
                f"the code {of} is compiled by torch.compile, and cannot be seen: give the module "
                "as it was before (model._orig_mod)"
            )
        if isinstance(part, torch.jit.ScriptModule):
            yield f"the code {of} is TorchScript, and cannot be seen: give the plain module"
        if "forward" in vars(part) and (part is model or not _is_own_method(part)):
            yield (
                f"the forward method {of} was replaced in this instance alone: write a class with "
                "that forward"
            )
    if model._forward_hooks or model._forward_pre_hooks:
        yield (
            "hooks on the model itself would be lost: wrap it in a module whose forward does the "
            "same"
        )
    if model._backward_hooks or model._backward_pre_hooks:
        yield "backward hooks on the model itself would be lost: put them on a part of it"
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            yield (
                f"hooks on the gradient of {name!r} would be lost, and would see the gradient of "
                "some rows alone: clip by clip_norm or clip_value of the experiment, give weights "
                "a learning rate of their own by wb.ParameterGroup, or let forward scale them"
            )
    if hidden := _HIDING & {name for name, _ in model.named_children()}:
        yield (
            f"it has a submodule named {' and '.join(sorted(hidden))}, a name that torch.fx uses "
            "itself: rename it"
        )


def line_of_model(end: CodeType) -> Place | None:
    """The line of the model's own code at which an operation is being recorded.

    Args:
        end: the code of the function that traces; what is outside of it does not matter.

    Raises:
        InsideError: the operation is under something that a graph does not record.
    """
    frame = sys._getframe()
    apply = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    line: Place | None = None
    while frame.f_back is not None and frame.f_code is not end:
        if line is None and is_users(frame.f_code.co_filename):
            line = frame.f_code, frame.f_lineno
        if frame.f_code is apply:
            raise InsideError(
                "the backward pass of a torch.autograd.Function would be lost: call its apply "
                "in a function marked by torch.fx.wrap; torch.utils.checkpoint.checkpoint has one "
                "unless use_reentrant=False, and plan.with_recompute does what it does"
            )
        frame = frame.f_back
    return line


def _is_own_method(part: nn.Module) -> bool:
    """Whether its forward is another method of its class, as `self.forward = self.forward_slow`."""
    forward = vars(part)["forward"]
    own = getattr(type(part), getattr(forward, "__name__", ""), None)
    return getattr(forward, "__self__", None) is part and forward.__func__ is own
