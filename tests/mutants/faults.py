"""Finds the places in a source where a fault can be planted, and plants it.

Code that decides no value is left out: texts, annotations, decorators, assertions, raised errors
and code that shows or closes; branches for hardware that this machine lacks; and faults that do not
change the compiled code.
"""

import ast
import builtins
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType, MappingProxyType
from typing import Any

from tests.mutants.operators import OPERATORS

# The annotations of positional parameters, by the name of a function or class.
Signatures = Mapping[str, tuple[str, ...]]
_NONE: Signatures = MappingProxyType({})

SHOWS = frozenset({"__repr__", "__str__", "__dir__", "_repr_html_", "_repr_pretty_", "_repr_svg_"})
CLOSES = frozenset({"close", "__del__", "__exit__", "closing"})
WARNS = frozenset({"warn", "warning", "info", "debug", "print"})
HARDWARE = ("cuda", "nccl", "gpu")
# Calls in which the order of a tuple has no meaning.
SETS = frozenset(
    {"isinstance", "issubclass", "startswith", "endswith", "frozenset", "set", "hasattr"}
)


@dataclass(frozen=True)
class Fault:
    """A change of one place in one file, by the operator `kind`.

    `lines` are the first and last of the changed statement, or of its head if it has a body. Where
    it is in no `function`, it is executed when the file is imported. The bytes from `start` to
    `end` are replaced.
    """

    kind: str
    file: str
    line: int
    lines: tuple[int, int]
    function: bool
    start: int
    end: int
    old: str
    new: str

    def planted(self, source: str) -> str:
        """The source with the fault."""
        content = source.encode()
        return (content[: self.start] + self.new.encode() + content[self.end :]).decode()

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}:{self.line}  {self.kind}: {old}  ->  {new}"


def faults(source: str, file: str, signatures: Signatures = _NONE) -> list[Fault]:
    """Every fault that can be planted in a source, in order; one of those with equal effect.

    Arguments are swapped where `signatures` give equal annotations to neighbours.
    """
    tree = ast.parse(source)
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[str, Fault] = {}
    for place in _places(tree, _Place(tree)):
        node = place.node
        if not hasattr(node, "lineno"):
            continue
        node.decides = place.decides
        if isinstance(node, ast.Call):
            node.alike = _alike(node, signatures)  # type: ignore[attr-defined]
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        old = source.encode()[start:end].decode()
        for kind, operator in OPERATORS.items():
            for new in operator(node):
                text = _text(new, old)
                fault = Fault(
                    kind, file, node.lineno, place.lines, place.function, start, end, old, text
                )
                found.setdefault(fault.planted(source), fault)
    before = _essence(compile(source, file, "exec"))
    return [
        fault
        for planted, fault in found.items()
        if (code := _compiled(planted, file)) is not None and _essence(code) != before
    ]


def signatures(sources: Iterable[str]) -> Signatures:
    """The annotations of every function's and every constructor's positional parameters."""
    found: dict[str, tuple[str, ...] | None] = {}
    for tree in map(ast.parse, sources):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                _enter(found, node.name, _parameters(node))
            elif isinstance(node, ast.ClassDef):
                made = [f for f in node.body if getattr(f, "name", "") == "__init__"]
                fields = [f for f in node.body if isinstance(f, ast.AnnAssign)]
                if made and isinstance(made[0], ast.FunctionDef):
                    _enter(found, node.name, _parameters(made[0]))
                elif fields:
                    _enter(found, node.name, tuple(ast.unparse(f.annotation) for f in fields))
    return {name: annotations for name, annotations in found.items() if annotations is not None}


def _enter(
    found: dict[str, tuple[str, ...] | None], name: str, annotations: tuple[str, ...]
) -> None:
    """Enters a signature; a name with two different signatures gets none."""
    found[name] = annotations if found.get(name, annotations) == annotations else None


def _parameters(function: ast.FunctionDef) -> tuple[str, ...]:
    arguments = [*function.args.posonlyargs, *function.args.args]
    return tuple(
        ast.unparse(argument.annotation) if argument.annotation else ""
        for argument in arguments
        if argument.arg not in ("self", "cls", "ctx")
    )


def _alike(call: ast.Call, signatures: Signatures) -> tuple[int, ...]:
    """The positions of arguments that could be confused with the next."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            annotations = signatures.get(name, ())
        case _:
            return ()
    pairs = enumerate(pairwise(annotations[: len(call.args)]))
    return tuple(at for at, (first, second) in pairs if first == second != "")


@dataclass(frozen=True)
class _Place:
    node: Any
    function: bool = False
    lines: tuple[int, int] = (1, 1)
    decides: bool = False


def _places(node: ast.AST, place: _Place) -> Iterator[_Place]:
    """All nodes that decide values, with their places."""
    yield place
    match node:
        case ast.Call(func=ast.Name(id="any" | "all"), args=[ast.GeneratorExp(generators=those)]):
            for one in those:
                one.for_any = True  # type: ignore[attr-defined]  # its order has no meaning
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _left_out(node, name, child):
                inside = place.function or (
                    isinstance(node, ast.FunctionDef | ast.Lambda) and name == "body"
                )
                lines = _lines(child) if isinstance(child, ast.stmt) else place.lines
                decides = name in ("test", "ifs") and not isinstance(node, ast.While)
                yield from _places(child, _Place(child, inside, lines, decides))


def _left_out(parent: ast.AST, name: str, child: ast.AST) -> bool:
    if name in ("annotation", "returns", "decorator_list", "bases", "type_comment", "msg", "type"):
        return True
    if isinstance(parent, ast.If) and (never := _never(parent.test)):
        return name in (never, "test")
    if isinstance(parent, ast.Subscript) and name == "slice" and _is_type(parent.value):
        return True  # dict[str, int](): annotations as well
    match child:
        case ast.Raise() | ast.Assert() | ast.JoinedStr():
            return True
        case ast.IfExp(test=test):
            return _never(test) != ""
        case ast.FunctionDef(name=called) | ast.ClassDef(name=called):
            return called in SHOWS | CLOSES or _on_hardware(ast.Name(called))
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)):
            return called in WARNS or "cuda" in ast.unparse(child.func)
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.keyword(arg="strict" | "daemon"):  # assertions of zip; how a process ends
            return True
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
            return True
        case ast.Assign(targets=[ast.Name(id=alias)], value=ast.Subscript()) if (
            isinstance(parent, ast.Module) and not alias.isupper()
        ):
            return True  # of a type
        case ast.Compare(comparators=[ast.Constant(value="cpu")]):
            return True  # the other branch is never taken without a GPU
        case ast.AnnAssign(annotation=annotation) if "Literal[" in ast.unparse(annotation):
            return True
        case ast.Tuple() | ast.List() | ast.Set():
            return _is_set(parent, name)
    return False


def _is_type(node: ast.AST) -> bool:
    """Whether it is a class of Python's own."""
    return isinstance(node, ast.Name) and isinstance(getattr(builtins, node.id, None), type)


def _is_set(parent: ast.AST, name: str) -> bool:
    """Whether the order of a sequence at this place has no meaning."""
    match parent:
        case ast.Compare(ops=[ast.In() | ast.NotIn()]):
            return name == "comparators"
        case ast.comprehension():
            return name == "iter" and getattr(parent, "for_any", False)
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)):
            return called in SETS
        case ast.Assign(value=ast.Subscript() | ast.BinOp()) | ast.BinOp(op=ast.BitOr()):
            return False
    return False


def _never(test: ast.AST) -> str:
    """The branch of a condition that no machine without a GPU takes: "body", "orelse", or ""."""
    match test:
        case ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(value="cpu")]):
            return "orelse"
        case ast.Compare(ops=[ast.NotEq()], comparators=[ast.Constant(value="cpu")]):
            return "body"
        case ast.Name(id="TYPE_CHECKING"):
            return "body"
    return "body" if _on_hardware(test) else ""


def _on_hardware(test: ast.AST) -> bool:
    return any(word in ast.unparse(test).lower() for word in HARDWARE)


def _lines(statement: ast.stmt) -> tuple[int, int]:
    body = getattr(statement, "body", None)
    end = statement.end_lineno or statement.lineno
    return statement.lineno, max(statement.lineno, body[0].lineno - 1) if body else end


def _text(new: ast.AST, old: str) -> str:
    text = ast.unparse(ast.fix_missing_locations(new))
    loose = (ast.BinOp, ast.BoolOp, ast.Compare, ast.UnaryOp, ast.IfExp, ast.Lambda)
    return f"({text})" if isinstance(new, loose) else text


def _compiled(source: str, file: str) -> CodeType | None:
    """The compiled source; None for what Python refuses or warns about."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return compile(source, file, "exec")
        except (SyntaxError, ValueError):
            return None


def _essence(code: CodeType) -> tuple[Any, ...]:
    """The behaviour of compiled code, whatever its line numbers are."""
    constants = tuple(
        _essence(constant) if isinstance(constant, CodeType) else (type(constant), constant)
        for constant in code.co_consts
    )
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars
