"""The way of a run through the house, and the places to add to it: read from the code itself.

A station is named by its room and its name; the file is looked up, and the files between two
stations are the shortest chain of imports from one to the other. What is not there, or
is not reached, is an error, so that neither drawing nor tables outlive a change of the code.
"""

import ast
from collections import deque
from functools import cache
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "workbench"

# Process: its stations, each (room, class and method, or function), in the order of the way; and
# how the last one hands on to the next process, where nobody imports anybody.
WAY = (
    (
        "notebook",
        (
            ("client", "Cluster.train"),
            ("client", "Jobs.submit"),
            ("client", "request"),
            ("store", "Store.submit"),
        ),
        "one job specification, in the store's SQLite file",
    ),
    (
        "job server",
        (("server", "Queue.settle"), ("scheduler", "schedule")),
        "engines are claimed, in one transaction",
    ),
    (
        "job server",
        (("server", "JobRunner.advance"), ("store", "Assignment")),
        "one control message to each engine, of 64 KiB at most",
    ),
    (
        "engine",
        (("engine", "run"), ("store", "Telemetry.emit")),
        '"module:function" of the job is called',
    ),
    (
        "engine",
        (("train", "train"), ("train", "Loop"), ("train", "strategy_of"), ("comm", "Group")),
        "rows of metrics, in files of the rank",
    ),
    ("notebook", (("client", "Job.watch"), ("store", "AttemptReader.read")), "the same rows, once"),
    ("notebook", (("client", "Run.take"),), ""),
)

# What is added, and where: (room, class or function), what it is there.
EXTENSIONS = (
    ("a scheme of a layer", ("plan", "Scheme"), "the base class: placements, pieces, computation"),
    ("", ("layers", "cut"), "where a layer is put in the place of the whole one"),
    ("a codec", ("plan", "Codec"), "its name, bytes and error"),
    ("", ("comm", "Coder"), "the base class: what travels instead of values"),
    ("an all-reduce algorithm", ("comm", "Algorithm"), "the base class: rounds of messages"),
    ("", ("plan", "chosen"), "its name, and when it is chosen"),
    ("", ("comm", "MessageRound"), "one round: what is sent, and what is done with what comes"),
    ("", ("predict.traffic", "Costs"), "its messages and bytes: a function of its own"),
    ("a strategy", ("plan", "Strategy"), "the base class: when gradients are summed and used"),
    ("", ("plan", "Synchronous"), "the value that an experiment has, beside this one"),
    ("", ("train", "Strategy"), "the base class: what a rank does with gradients"),
    ("a rule for plans", ("plan", "Rule"), "the base class: a plan of any model"),
    ("a data set", ("train", "Dataset"), "the protocol: pixels and labels by index"),
    ("", ("train", "open_data"), "where a name becomes one"),
    ("a widget", ("widgets", "Widget"), "the base class: state, its still, its script"),
    ("", ("widgets", "Explorer"), "the base class of those that draw a formula with sliders"),
)


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    paths = ((ROOT / PACKAGE).rglob("*.py")) if (ROOT / PACKAGE).is_dir() else ()
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
        if "node_modules" not in path.parts
    }


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text("utf-8"))


@cache
def imports(module: str) -> tuple[str, ...]:
    """The modules of the package that a module imports, wherever it does."""
    found: dict[str, None] = {}
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found[inner if inner in modules() else str(node.module)] = None
        elif isinstance(node, ast.Import):
            found |= {alias.name: None for alias in node.names if alias.name in modules()}
    return tuple(found)


@cache
def home(room: str, name: str) -> str:
    """The module of a room that defines a class (and its method), or a function.

    Of several that define the name, the module that is called like it is meant.

    Raises:
        LookupError: None defines it, or several do.
    """
    first, _, method = name.partition(".")
    found = [
        module
        for module in sorted(modules())
        if f"{module}.".startswith(f"{PACKAGE}.{room}.")
        and any(
            isinstance(node, ast.ClassDef | ast.FunctionDef)
            and node.name == first
            and (not method or method in _methods(node))
            for node in _tree(module).body
        )
    ]
    named = [module for module in found if module.rpartition(".")[2] == first]
    if len(found) != 1 and len(named) != 1:
        raise LookupError(f"{PACKAGE}/{room} defines {name} in {found or 'no module'}")
    return found[0] if len(found) == 1 else named[0]


def _methods(node: ast.stmt) -> set[str]:
    body = node.body if isinstance(node, ast.ClassDef) else []
    return {each.name for each in body if isinstance(each, ast.FunctionDef)}


def between(one: str, other: str) -> tuple[str, ...]:
    """The modules between two, on the shortest chain of imports.

    Raises:
        LookupError: No chain leads from one to the other.
    """
    before: dict[str, str] = {one: ""}
    queue = deque([one])
    while queue and other not in before:
        module = queue.popleft()
        for each in imports(module):
            if each in modules() and each not in before:
                before[each] = module
                queue.append(each)
    if other not in before:
        raise LookupError(f"no chain of imports leads from {one} to {other}")
    chain = [other]
    while chain[-1] != one:
        chain.append(before[chain[-1]])
    return tuple(chain[-2:0:-1])


def way() -> str:
    """The way of a run: each station with its file, and the files between two."""
    top, parts, last = 24, [], ""
    for process, stations, handed in WAY:
        if process != last:
            parts.append(_text(8, top + 4, process, "600"))
            last, top = process, top + 22
        before = ""
        for room, name in stations:
            module = home(room, name)
            if before and before != module:
                chain = between(before, module)
                told = " › ".join(map(_file, chain)) if chain else "imports"
                parts.append(_text(48, top, f"↓ {told}", size=11))
                top += 20
            parts.append(_station(top, name, _file(module)))
            before, top = module, top + 38
        if handed:
            parts.append(_text(48, top, f"⇣ {handed}", size=11))
            top += 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {top}" role="img" '
        'style="max-width:640px;width:100%;font:13px sans-serif" fill="currentColor">'
        f"<title>The way of a run</title>{''.join(parts)}</svg>"
    )


def extension_points() -> str:
    """Where what is added goes: a table in Markdown."""
    rows = [
        f"| {what} | `{_file(home(room, name))}` | `{name}` | {told} |"
        for what, (room, name), told in EXTENSIONS
    ]
    return "\n".join(["| to add | file | name | what it is |", "|---|---|---|---|", *rows])


def _file(module: str) -> str:
    return modules()[module].relative_to(ROOT / PACKAGE).as_posix()


def _station(top: float, name: str, path: str) -> str:
    box = (
        f'<rect x="28" y="{top - 12}" width="584" height="28" rx="4" fill="#4477aa" '
        'fill-opacity="0.15" stroke="#4477aa"/>'
    )
    return box + _text(40, top + 6, name, "600") + _text(600, top + 6, path, anchor="end")


def _text(
    x: float, y: float, text: str, weight: str = "400", anchor: str = "start", size: int = 13
) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" '
        f'font-size="{size}">{escape(text)}</text>'
    )
