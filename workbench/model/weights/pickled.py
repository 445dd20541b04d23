"""A pickle as data: names stay names, and what would be called or built becomes a record.

Python's `pickle` imports what a pickle names, and calls it. Here `pickletools` splits the bytes
into operations. The few that torch's checkpoints consist of are carried out on plain values, and
any other is refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pickletools import genops
from typing import Any, TypeVar

T = TypeVar("T")

MOST_OPERATIONS = 1 << 24
"""Of one pickle: each may take a byte of it, and a hundred bytes of memory."""

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_NUMBERS_AND_TEXTS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}


@dataclass(frozen=True)
class Name:
    """The name of a class or function, which nobody looks up."""

    text: str


@dataclass(eq=False)
class Record:
    """An object that was pickled.

    Attributes:
        name: the name of its class, or of the function that makes it, without the module; "" for a
            reference to data outside of the pickle.
        arguments: the arguments of that call.
        state: the state that is set after it.
    """

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


def records(content: bytes) -> Any:
    """Returns what a pickle holds: plain values, names and records.

    Raises:
        ValueError: it is damaged, too long, or no checkpoint of torch has such a one.
        LookupError: it uses a value that is not there.
    """
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: dict[Any, Any] = {}

    def pop(kind: type) -> Any:
        return typed(kind, stack.pop())

    for number, (operation, argument, _) in enumerate(genops(content)):
        if number == MOST_OPERATIONS:
            raise ValueError(f"it has more than {MOST_OPERATIONS:,} operations")
        match operation.name:
            case name if name in _NUMBERS_AND_TEXTS:
                stack.append(argument)
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                break
            case "MARK":
                marks.append(stack)
                stack = []
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                size = int(name[-1])
                stack[-size:] = [tuple(stack[-size:])]
            case "TUPLE":
                items, stack = stack, marks.pop()
                stack.append(tuple(items))
            case "APPEND":
                item = stack.pop()
                typed(list, stack[-1]).append(item)
            case "APPENDS":
                items, stack = stack, marks.pop()
                typed(list, stack[-1]).extend(items)
            case "SETITEM":
                items = [stack.pop(), stack.pop()]
                _put(stack[-1], reversed(items))
            case "SETITEMS":
                items, stack = stack, marks.pop()
                _put(stack[-1], items)
            case "GLOBAL":
                stack.append(Name(str(argument).replace(" ", ".")))
            case "STACK_GLOBAL":
                name, module = pop(str), pop(str)
                stack.append(Name(f"{module}.{name}"))
            case "REDUCE" | "NEWOBJ":
                arguments, name = pop(tuple), pop(Name)
                stack.append(Record(name.text.rpartition(".")[2], arguments))
            case "BINPERSID":
                stack.append(Record("", pop(tuple)))
            case "BUILD":
                state = stack.pop()
                typed(Record, stack[-1]).state = state
            case other:
                raise ValueError(f"it has the operation {other}, which no checkpoint of torch has")
    (found,) = stack
    return found


def typed(kind: type[T], value: Any) -> T:
    """Returns the value, which is to be of this very type.

    Raises:
        ValueError: it is of another.
    """
    if type(value) is not kind:
        raise ValueError(f"it has a {type(value).__name__} in the place of a {kind.__name__}")
    return value


def _put(mapping: Any, items: Iterable[Any]) -> None:
    """Sets keys, each followed by its value. A tuple is no key: to hash it could take ages."""
    each = iter(items)
    for key, value in zip(each, each, strict=True):
        if type(key) not in (str, int, Record):
            raise ValueError(f"it has a {type(key).__name__} for a key")
        typed(dict, mapping)[key] = value
