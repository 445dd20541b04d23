"""A pickle as data: names stay names, and what would be called or built becomes a record.

Python's `pickle` imports what a pickle names, and calls it. Here `pickletools` splits the bytes
into operations. The few that torch's checkpoints and CIFAR-10 consist of are carried out on plain
values, and any other is refused.
"""

from dataclasses import dataclass
from pickletools import genops
from typing import Any, TypeVar

T = TypeVar("T")

MOST_OPERATIONS = 1 << 24
"""Of one pickle: each may take a byte of it, and a hundred bytes of memory."""

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_SAID = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING", "SHORT_BINSTRING"),
}
_TAKES = {
    **{"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2},
    **{"STACK_GLOBAL": 2, "REDUCE": 2, "NEWOBJ": 2, "BUILD": 1, "BINPERSID": 1},
}
_TAKES_ALL = {"TUPLE", "APPENDS", "SETITEMS"}


class Name(str):
    """The name of a class or function, as "module.name", which nobody looks up."""


@dataclass(eq=False)
class Record:
    """An object that was pickled.

    Attributes:
        name: the name of its class, or of the function that makes it; "": it is a reference to
            data outside of the pickle.
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
    for number, (operation, argument, _) in enumerate(genops(content)):
        if number == MOST_OPERATIONS:
            raise ValueError(f"it has more than {MOST_OPERATIONS:,} operations")
        taken = [stack.pop() for _ in range(_TAKES.get(operation.name, 0))][::-1]
        if operation.name in _TAKES_ALL:
            taken, stack = stack, marks.pop()
        match operation.name:
            case name if name in _SAID:
                stack.append(argument)
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "MEMOIZE" | "BINPUT" | "LONG_BINPUT":
                memo[len(memo) if argument is None else argument] = stack[-1]
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(taken))
            case "EMPTY_LIST":
                stack.append([])
            case "APPEND" | "APPENDS":
                typed(list, stack[-1]).extend(taken)
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEM" | "SETITEMS":
                for key, value in zip(taken[::2], taken[1::2], strict=True):
                    if type(key) not in (str, int, Record):  # a tuple could take ages to hash
                        raise ValueError(f"it has a {type(key).__name__} for a key")
                    typed(dict, stack[-1])[key] = value
            case "GLOBAL":
                stack.append(Name(str(argument).replace(" ", ".")))
            case "STACK_GLOBAL":
                stack.append(Name(".".join(typed(str, each) for each in taken)))
            case "REDUCE" | "NEWOBJ":
                stack.append(Record(typed(Name, taken[0]), typed(tuple, taken[1])))
            case "BINPERSID":
                stack.append(Record("", typed(tuple, taken[0])))
            case "BUILD":
                typed(Record, stack[-1]).state = taken[0]
            case "MARK":
                marks.append(stack)
                stack = []
            case "STOP":
                break
            case name if name not in ("PROTO", "FRAME"):
                raise ValueError(f"it has the operation {name}, which no checkpoint of torch has")
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
