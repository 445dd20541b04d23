"""What torch does otherwise while a model is traced."""

import builtins
import logging
import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import fake_tensor
from torch.fx import Proxy
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode_temporarily,
)
from torch.utils import checkpoint
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from workbench.model.errors import TraceError
from workbench.model.record.batch import DEVICES
from workbench.model.record.failure import is_users
from workbench.model.record.proxy import ValueProxy


class RecordedFactories(TorchFunctionMode):
    """Records `torch.arange(8)` and the like, which involve no proxy, as operations."""

    def __init__(self, record: Callable[[Any, Any, Any], Any | None]) -> None:
        super().__init__()
        self.record = record
        # torch keeps this set: it must be asked before `sizes_as_tuples` stands in for some.
        self.factories = {*_device_constructors(), torch.normal}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = self.record(func, args, kwargs or {}) if func in self.factories else None
        return func(*args, **(kwargs or {})) if made is None else made

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Takes this mode off, if it is the innermost: each attribute of a tensor would ask it."""
        if _get_current_function_mode_stack()[-1:] != [self]:
            yield
            return
        with _pop_mode_temporarily():
            yield


@contextmanager
def sizes_as_tuples() -> Iterator[None]:
    """Lets `torch.rand(n, 3)` be recorded, whose sizes would refuse proxies, and `len(x)`."""

    def tolerant(factory: Any) -> Any:
        def make(*sizes: Any, **options: Any) -> Any:
            apart = any(isinstance(size, Proxy) for size in sizes)
            return factory(sizes, **options) if apart else factory(*sizes, **options)

        return make

    def length(of: Any, /) -> Any:
        return of.length if type(of) is ValueProxy else known(of)

    were = {name: getattr(torch, name) for name in ("empty", "ones", "rand", "randn", "zeros")}
    known, builtins.len = len, length
    try:
        for name, factory in were.items():
            setattr(torch, name, tolerant(factory))
        yield
    finally:
        builtins.len = known
        for name, factory in were.items():
            setattr(torch, name, factory)


@contextmanager
def limits_recorded(record: Callable[[Any, Any, Any], Any | None]) -> Iterator[None]:
    """Lets `torch.finfo(x.dtype)` be recorded, which is otherwise in another precision."""
    finfo: Any = torch.finfo

    def limits(*args: Any) -> Any:
        recorded = bool(args) and isinstance(args[0], Proxy)
        return record(finfo, args, {}) if recorded else finfo(*args)

    torch.finfo = limits  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.finfo = finfo  # type: ignore[misc]


@contextmanager
def refuse_other_draws() -> Iterator[None]:
    """Refuses random numbers that are not torch tensors, and seeds that the model sets itself.

    The former would become constants. What a layer draws follows from the experiment's seed.

    Raises:
        TraceError: some were drawn, or a seed was set.
    """
    before = _other_generators()
    with _seeds_refused():
        yield
    for name, state in _other_generators().items():
        if state != before[name]:
            raise TraceError(
                f"forward draws from {name}: the number drawn while tracing would be used for "
                "ever. Draw a tensor, torch.rand(len(x), 1), and choose by torch.where"
            )


@contextmanager
def _seeds_refused() -> Iterator[None]:
    """Has the functions that set the state of torch's generators raise where a model calls them."""
    were = [
        (module, name, getattr(module, name))
        for module in (torch, torch.random, torch.cuda)
        for name in ("manual_seed", "manual_seed_all", "seed", "set_rng_state", "fork_rng")
        if hasattr(module, name)
    ]

    def refusing(name: str, function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            if not is_users(sys._getframe(1).f_code.co_filename):
                return function(*args, **kwargs)
            raise TraceError(
                f"{name} in forward: what layers draw follows from the experiment's seed, its step "
                "and the places of the elements, so that it is the same however the model is "
                "split. Leave it out, and choose wb.Experiment(seed=...); numbers that are to be "
                "the same in every step, draw in __init__, self.register_buffer(...)"
            )

        return called

    try:
        for module, name, function in were:
            setattr(module, name, refusing(f"{module.__name__}.{name}", function))
        yield
    finally:
        for module, name, function in were:
            setattr(module, name, function)


def _other_generators() -> dict[str, object]:
    of_numpy: Any = np.random.get_state(legacy=False)
    key, pos = of_numpy["state"]["key"], of_numpy["state"]["pos"]
    return {
        "Python's random": random.getstate(),
        "numpy.random": (key.tobytes(), pos, of_numpy["has_gauss"]),
    }


@contextmanager
def momentum_known(module: nn.Module | None) -> Iterator[None]:
    """Keeps a cumulative batch norm from reading its count of batches, which has no value here."""
    if not isinstance(module, _BatchNorm) or module.momentum is not None:
        yield
        return
    module.momentum = 1.0
    try:
        yield
    finally:
        module.momentum = None


@contextmanager
def by_kernels() -> Iterator[None]:
    """Has an operation's own kernel say what shapes it gives, where there is one.

    torch prefers decompositions in Python on fake tensors, a batch norm's of some twenty
    operations: tracing a DenseNet took twice as long.
    """
    name = "torch_decomp_decompositions"  # torch's own, and not public
    prefers = getattr(fake_tensor, name, None)
    if prefers is None:
        yield
        return

    def lacks_kernel(func: torch._ops.OpOverload) -> bool:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Meta")
        return not has_kernel and prefers(func)

    setattr(fake_tensor, name, lacks_kernel)
    try:
        yield
    finally:
        setattr(fake_tensor, name, prefers)


@contextmanager
def transformers_as_trained() -> Iterator[None]:
    """Has torch's transformer layers call their parts in evaluation, too, whatever their mask is.

    Else one kernel would do all of a layer, and torch would look at a mask's values for a hint that
    it can do without, and at its type for a warning.
    """
    mha, detects = torch.backends.mha, "_detect_is_causal_mask"
    fast, dtype_of, made = mha.get_fastpath_enabled(), F._none_or_dtype, F._canonical_mask
    were: list[tuple[Any, str, Any]] = [(transformer, detects, getattr(transformer, detects, None))]
    were += [(F, "_none_or_dtype", dtype_of), (F, "_canonical_mask", made)]

    def mask_of(mask: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(mask, Proxy):
            return made(mask, *args, **kwargs)
        given: Any = mask
        if torch.is_floating_point(given):
            return given
        return torch.zeros_like(given, dtype=kwargs["target_type"]).masked_fill(given, -math.inf)

    instead: list[Any] = [
        lambda mask, is_causal=None, size=None: is_causal is True,
        lambda x: None if isinstance(x, Proxy) else dtype_of(x),
        mask_of,
    ]
    try:
        mha.set_fastpath_enabled(False)
        for (module, name, _), function in zip(were, instead, strict=True):
            setattr(module, name, function)
        yield
    finally:
        mha.set_fastpath_enabled(fast)
        for module, name, was in were:
            setattr(module, name, was)


@contextmanager
def checkpoints_left_out() -> Iterator[None]:
    """Has what a checkpoint would recompute run as it is: a plan says what is recomputed.

    Older torches save what it reads in an autograd function of their own.
    """
    name = "_checkpoint_without_reentrant_generator"  # torch's own, and not public
    saving = getattr(checkpoint, name)

    def nothing(*_: Any, **__: Any) -> Iterator[None]:
        yield

    setattr(checkpoint, name, nothing)
    try:
        yield
    finally:
        setattr(checkpoint, name, saving)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps torch from logging the traceback of an error that is raised anyway."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


@contextmanager
def modes_restored() -> Iterator[None]:
    """Leaves torch's modes as they were, wherever an interrupt falls.

    An interrupt (Ctrl-C, a notebook's stop button) between a mode's start and the `with` that would
    end it leaves the mode on: all tensors that are made later would be fake, or have no gradient.
    """
    stacks = _get_current_dispatch_mode_stack, _get_current_function_mode_stack
    depths = [len(stack()) for stack in stacks]
    gradients = torch.is_grad_enabled()
    try:
        yield
    finally:
        for stack, depth in zip(stacks, depths, strict=True):
            for mode in reversed(stack()[depth:]):
                mode.__exit__(None, None, None)
        torch.set_grad_enabled(gradients)


@contextmanager
def autocast_watched(disabled: list[str]) -> Iterator[None]:
    """Keeps a list of the devices for which autocast is disabled, from the outermost on."""
    cls: Any = torch.autocast
    enter, leave = cls.__enter__, cls.__exit__

    def entered(self: Any) -> Any:
        if not self._enabled:
            disabled.append(self.device)
        return enter(self)

    def left(self: Any, *error: Any) -> Any:
        if not self._enabled:
            disabled.pop()
        return leave(self, *error)

    cls.__enter__, cls.__exit__ = entered, left
    try:
        yield
    finally:
        cls.__enter__, cls.__exit__ = enter, leave


def modes() -> tuple[bool, ...]:
    """Whether gradients are recorded, and whether autocast is on, on each device."""
    autocast = (torch.is_autocast_enabled(device) for device in DEVICES)
    return torch.is_grad_enabled(), *autocast
