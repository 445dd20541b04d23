"""What Python code can remember from one call to the next, as values that can be compared.

A function remembers in its closure, in globals that its code names, and in its attributes; an
object in its attributes; both in whatever these hold. The code of installed packages is left out,
since a walk through the globals of a library has no end; the objects that it makes are not.
"""

import hashlib
import random
import sys
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import cache, partial
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Proxy

from workbench.model.record.failure import is_users

_METHODS = (BuiltinMethodType, MethodType, MethodWrapperType)
PLAIN = (bool, int, float, complex, str, bytes, type(None))
State = dict[str, Any]
"""Plain values, digests of tensors, and objects by identity, by where they are found."""

_MOST_VALUES, _MOST_ITEMS, _MOST_BYTES = 20_000, 1_000, 16 << 20
# Loggers, locks, files and the like lead to half of the process, and remember nothing for a model.
_OTHERS = {*sys.stdlib_module_names, "torch", "torchvision"} - {"__main__"}
_OPAQUE = sys.stdlib_module_names - {"builtins", "collections", "functools", "itertools", "types"}
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})


class Same:
    """An object that is equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value  # which keeps its id from being used again

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


class Walk:
    """Finds the state of several values; what they share is found once."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._state: State = {}
        self._digested = 0  # bytes

    def of(self, value: Any, name: str) -> State:
        """The state of one value, apart from what was found before."""
        if isinstance(value, PLAIN):
            return {name: value}
        self._state = {}
        self._add(name, value)
        return self._state

    def of_classes(self, objects: Iterable[object]) -> State:
        """The state that the methods of these objects, and their classes, have."""
        self._state = {}
        for kind in dict.fromkeys(type(each) for each in objects):
            self._class(kind)
        return self._state

    def _add(self, name: str, value: Any) -> None:
        while name in self._state:  # of another closure, module or key that is called so
            name += "[again]"
        if isinstance(value, PLAIN):
            self._state[name] = value
            return
        if id(value) in self._seen or len(self._seen) > _MOST_VALUES:
            return
        self._seen[id(value)] = value
        is_meta = isinstance(value, Tensor) and value.is_meta
        if is_meta or isinstance(value, Proxy | FakeTensor | ModuleType):
            self._state[name] = Same(value)
        elif isinstance(value, Tensor | np.ndarray):
            self._digested += value.nbytes
            self._state[name] = _content(value, self._digested)
        elif isinstance(value, list | tuple | dict | set | frozenset | deque):
            self._container(name, value)
        elif isinstance(value, FunctionType):
            self._function(name, value)
        elif isinstance(value, type):
            self._class(value)
        else:
            self._object(name, value)

    def _container(self, name: str, value: Any) -> None:
        self._state[f"{name}[length]"] = (len(value),)
        if len(value) > _MOST_ITEMS:
            return
        if isinstance(value, set | frozenset):
            plain = [each for each in value if isinstance(each, PLAIN)]
            self._state[name] = sorted(plain, key=repr)
        elif isinstance(value, dict):
            for key, each in list(value.items()):
                self._add(f"{name}[{key!r}]" if isinstance(key, PLAIN) else f"{name}[...]", each)
        else:
            for index, each in enumerate(list(value)):
                self._add(f"{name}[{index}]", each)

    def _function(self, name: str, function: FunctionType) -> None:
        for variable, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            with suppress(ValueError):  # nothing was assigned yet
                self._add(f"{variable!r} in the closure of {function.__name__}", cell.cell_contents)
        self._add(f"the defaults of {function.__name__}", function.__defaults__)
        for attribute, value in vars(function).items():
            self._add(f"{name}.{attribute}", value)
        if not is_own(function.__code__):
            return
        names = _names(function.__code__)
        for variable in sorted(names & function.__globals__.keys()):
            value = function.__globals__[variable]
            self._add(f"the global {variable!r}", value)
            if isinstance(value, ModuleType) and _is_own(vars(value).get("__file__") or "<frozen"):
                for attribute in sorted(names & vars(value).keys()):
                    self._add(f"{variable}.{attribute}", vars(value)[attribute])

    def _class(self, kind: type) -> None:
        """The methods and plain attributes of a class of the user's own."""
        for base in kind.__mro__:
            if base.__module__.partition(".")[0] in _OTHERS:
                continue
            for name, value in list(vars(base).items()):
                function = _code_of(value)
                if function is not None and is_own(function.__code__):
                    self._add(f"{base.__name__}.{name}", function)
                elif not name.startswith("__") and isinstance(value, (*PLAIN, list, dict, set)):
                    self._add(f"{base.__name__}.{name}", value)

    def _object(self, name: str, value: Any) -> None:
        if isinstance(value, random.Random):
            self._state[name] = value.getstate()
        elif isinstance(value, np.random.Generator):
            self._state[name] = repr(value.bit_generator.state)
        elif isinstance(value, np.random.RandomState):
            self._state[name] = repr(value.get_state(legacy=False))
        elif isinstance(value, torch.Generator):
            self._state[name] = _content(value.get_state(), 0)
        elif isinstance(value, _METHODS) and value.__self__ is not None:
            self._add(name, value.__self__)
            self._add(f"{name}()", getattr(value, "__func__", None))
        elif isinstance(value, partial):
            for part in (value.func, value.args, value.keywords):
                self._add(name, part)
        elif isinstance(value, GeneratorType):
            frame = value.gi_frame
            self._state[name] = None if frame is None else frame.f_lasti
            self._add(name, {} if frame is None else dict(frame.f_locals))
        elif type(value).__module__.partition(".")[0] in _OPAQUE:
            self._state[name] = Same(value)
        elif (attributes := _attributes(value)) is not None:
            self._class(type(value))
            for attribute, each in attributes.items():
                self._add(f"{name}.{attribute}", each)
        elif type(value).__module__ in ("builtins", "collections", "itertools"):
            self._add(name, _reduced(value))
        else:
            self._state[name] = Same(value)


def moved(before: State, after: State) -> list[str]:
    """Returns what differs between two states of the same objects, by name."""
    names = [name for name in {**before, **after} if _differ(before, after, name)]
    return list(dict.fromkeys(name.partition("[")[0] for name in names))


def is_own(code: CodeType) -> bool:
    """Whether code is neither torch's nor Python's nor of any installed package."""
    return _is_own(code.co_filename)


def _is_own(file: str) -> bool:
    return is_users(file) and not file.startswith(_INSTALLED)


def _differ(before: State, after: State, name: str) -> bool:
    if name not in before or name not in after:
        return True
    was, now = before[name], after[name]
    if type(was) is not type(now):
        return True
    return bool(was != now) and not (was != was and now != now)


@cache
def _names(code: CodeType) -> frozenset[str]:
    """The globals and attributes that code names, and functions inside it."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(code.co_names).union(*inner)


def _attributes(value: Any) -> dict[str, Any] | None:
    """What an object has in its slots and its __dict__; None: it has neither."""
    found = dict(vars(value)) if type(value).__dictoffset__ else None
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(slot, MemberDescriptorType) and not name.startswith("__"):
                with suppress(AttributeError):  # nothing was assigned yet
                    found = (found or {}) | {name: slot.__get__(value)}
    return found


def _code_of(value: Any) -> FunctionType | None:
    """The function of a method, a class method, a static method or a property."""
    for attribute in ("__func__", "fget"):
        value = getattr(value, attribute, value)
    return value if isinstance(value, FunctionType) else None


def _content(value: Tensor | np.ndarray, digested: int) -> Any:
    """What tells a tensor's values from others; of a large one, its object and its version."""
    if digested > _MOST_BYTES or (isinstance(value, Tensor) and value.layout != torch.strided):
        return id(value), getattr(value, "_version", 0)
    array = value.detach().cpu().contiguous().view(-1) if isinstance(value, Tensor) else value
    raw = array.view(torch.uint8).numpy() if isinstance(array, Tensor) else array
    return tuple(value.shape), hashlib.blake2b(raw.tobytes(), digest_size=16).hexdigest()


def _reduced(value: Any) -> Any:
    """What pickle would write of an object without attributes: of an iterator, where it stands."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 and later would not pickle iterators
            return value.__reduce_ex__(2)[1:]
    except Exception:  # whatever it is that cannot be pickled
        return None
