"""A person's own code as it is when a run is submitted: the repository, classes and functions."""

import ast
import inspect
import linecache
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from workbench.client.run.own_objects import Libraries
from workbench.plan.extension.user_object import Own, mapped
from workbench.plan.io.value import Value

_GIT_S = 10.0
_OURS = __name__.partition(".")[0]


@dataclass(frozen=True)
class Repository:
    """The state of a git repository.

    Attributes:
        commit: the hash of the commit that is checked out; "" before the first.
        branch: the branch's name, or "(detached)".
        is_dirty: whether files that git follows differ from that commit.
    """

    commit: str
    branch: str
    is_dirty: bool


@dataclass(frozen=True)
class SourceText:
    """The text of one class or function.

    Attributes:
        place: the file and the line, or the notebook's cell, in which it stands.
        text: the text itself; "" where it cannot be had.
    """

    name: str
    place: str
    text: str


def repository(folder: Path) -> Repository | None:
    """The repository that a folder is in; None: it is in none, or git does not answer."""
    # Without locks, so that nobody's own git is refused meanwhile. New files are left out: the
    # runs' folders are new files, too.
    command = ["git", "--no-optional-locks", "-C", str(folder), "status"]
    command += ["--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    said, is_dirty = {}, False
    for line in done.stdout.splitlines():
        if line.startswith("# "):
            name, _, value = line[2:].partition(" ")
            said[name] = value
        else:
            is_dirty = True
    commit = said.get("branch.oid", "")
    return Repository(
        "" if commit == "(initial)" else commit, said.get("branch.head", ""), is_dirty
    )


def sources(module: nn.Module | None, experiment: Value) -> tuple[SourceText, ...]:
    """The texts of classes and functions, and of those that they call by name, each once.

    Left out is what packages have that are installed: their versions say what it is.
    """
    given: list[Any] = [] if module is None else [module]

    def note(own: Own, place: str) -> Own:
        if own.held is not None:
            given.append(own.held)
        return own

    mapped(experiment, note)
    found: dict[type | FunctionType, None] = {}
    waiting = [part for each in given for part in _parts(each)]
    for part in waiting:
        if part not in found and not _is_of_package(part.__module__ or ""):
            found[part] = None
            waiting += _called(part)
    return tuple(map(_source, found))


def _parts(given: Any) -> Iterator[type | FunctionType]:
    """A function itself; of an object, its class and those that this extends."""
    if isinstance(given, FunctionType):
        yield given
        return
    for each in given.modules() if isinstance(given, nn.Module) else [given]:
        yield from (each if isinstance(each, type) else type(each)).__mro__


def _called(part: type | FunctionType) -> Iterator[type | FunctionType]:
    """The functions and classes that the code of a function, or of a class's methods, names."""
    for function in [part] if isinstance(part, FunctionType) else _methods(part):
        for each in map(inspect.unwrap, filter(callable, _named(function))):
            if isinstance(each, type):
                yield from each.__mro__
            elif isinstance(each, FunctionType):
                yield each


def _methods(cls: type) -> Iterator[FunctionType]:
    """The functions of a class's own body, whatever makes them methods or properties."""
    for each in vars(cls).values():
        parts = (each, *(getattr(each, name, None) for name in ("__func__", "fget", "fset")))
        yield from (part for part in parts if isinstance(part, FunctionType))


def _named(function: FunctionType) -> list[Any]:
    """What the names in a function's code stand for, in its own module and those it imports."""
    codes = [function.__code__]
    for code in codes:  # with those of functions and comprehensions inside
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    names = [name for code in codes for name in code.co_names]
    found = [function.__globals__.get(name) for name in names]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty yet
            found.append(cell.cell_contents)
    modules = [each for each in found if isinstance(each, ModuleType)]
    own = [module for module in modules if not _is_of_package(module.__name__)]
    return found + [vars(module).get(name) for module in own for name in names]


def submitted_by() -> str:
    """The command line of this process, or the notebook whose kernel it is."""
    # Not imported: where it is not loaded yet, this is no notebook.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None:
        return " ".join(sys.orig_argv)
    named = (shell.user_ns.get(name) for name in ("__session__", "__vsc_ipynb_file__"))
    return str(next(filter(None, named), "an IPython session without a name"))


def _is_of_package(module: str) -> bool:
    """Whether the module of this name is Python's, ours, or an installed package's."""
    if module in sys.builtin_module_names or module.partition(".")[0] == _OURS:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(file, str) and file in Libraries.of_this_python()


def _source(part: type | FunctionType) -> SourceText:
    try:
        lines, line = inspect.getsourcelines(part)
        file = inspect.getsourcefile(part) or ""
        place = f"{file}, line {line}" if Path(file).exists() else _cell(file)
        return SourceText(part.__qualname__, place, "".join(lines))
    except (OSError, TypeError):  # a cell's class: it belongs to no file
        found = _in_cells(part) if isinstance(part, type) else iter(())
        return next(found, SourceText(part.__qualname__, "", ""))


def _in_cells(cls: type) -> Iterator[SourceText]:
    """The class, where the cell that holds one of its functions defines it."""
    for function in vars(cls).values():
        if not isinstance(function, FunctionType):
            continue
        file, line = function.__code__.co_filename, function.__code__.co_firstlineno
        cell = "".join(linecache.getlines(file))
        try:
            defined = [n for n in ast.walk(ast.parse(cell)) if isinstance(n, ast.ClassDef)]
        except SyntaxError:  # it holds a line that is IPython's own
            continue
        for node in defined:
            if node.name == cls.__name__ and node.lineno <= line <= (node.end_lineno or 0):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                lines = cell.splitlines()[first - 1 : node.end_lineno]
                yield SourceText(cls.__qualname__, _cell(file), "\n".join(lines) + "\n")


def _cell(file: str) -> str:
    """The number of the cell that IPython compiled under this name."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    named = None if shell is None else shell.compile.format_code_name(file)
    return file if named is None else " ".join(named)
