"""The house rules that a machine can check: imports, and what lies where."""

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import psutil
import pytest
from torch import nn

import workbench as wb
from workbench import comm
from workbench.store.tasks import TASKS, place_of
from workbench.supervisor import supervisor_of

ROOT = Path(__file__).resolve().parent.parent

# folder: the folders that it may import besides itself
MAY_IMPORT = {
    "plan": set(),
    "model": {"plan"},
    "comm": {"plan"},
    "program": {"plan"},
    "predict": {"plan", "program"},
    "layers": {"plan", "model", "comm"},
    "train": {"plan", "program", "model", "comm", "layers", "store"},
    "store": {"plan"},
    "scheduler": {"plan", "store"},
    "hosts": {"plan", "store"},
    "supervisor": {"plan", "store", "hosts"},
    "server": {"plan", "store", "scheduler"},
    "engine": {"plan", "model", "train", "store"},
    "client": {
        *("plan", "program", "model", "comm", "predict", "layers", "train"),
        *("store", "scheduler", "hosts", "supervisor"),
    },
    "widgets": {"plan", "program", "model", "predict", "store", "scheduler", "client"},
    "magics": {"plan", "client"},
}
MAY_IMPORT["bench"] = set(MAY_IMPORT) - {"magics"}

# third party: the only folders that may import it
LIVES_IN = {
    "torch": {"model", "comm", "layers", "train", "engine", "supervisor", "client", "bench"},
    "torchvision": {"model", "bench"},  # others: from workbench.model.vision import torchvision
    "safetensors": {"model", "train", "bench"},
    "sklearn": {"train", "bench"},
    "ipyparallel": {"hosts", "supervisor", "server", "client", "bench"},
    "sqlite3": {"store", "bench"},
    "ipywidgets": {"widgets"},
    "IPython": {"magics", "widgets"},
    "anywidget": {"widgets"},
}

# a process: packages whose libraries it never loads
DOES_WITHOUT = {
    "workbench.supervisor": {"torch", "scipy", "pandas", "torchvision", "safetensors"},
    "workbench.server": {"torch", "scipy", "pandas", "torchvision", "safetensors"},
    "ipyparallel.controller": {"torch", "scipy", "pandas", "pydantic_core"},
    "ipyparallel.engine": {"scipy", "pandas", "torchvision", "sklearn"},
}

INNER = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
NOT_TOLD = {"AssertionError", "NotImplementedError", "SystemExit"}

WITHOUT_TORCH = ("plan", "program", "predict")

TOP_LEVEL = {
    ".ci",
    ".gitattributes",
    ".gitignore",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "env",
    "notebooks",
    "pyproject.toml",
    "tests",
    "workbench",
}

# Folders that form a circle of imports today. This list can only shrink: a folder in it that is in
# no circle any more fails.
FOLDERS_IN_CIRCLES = {
    "client": {
        *("client", "client/calibration", "client/loggers", "client/records", "client/run"),
    },
    "predict": {"predict", "predict/time"},
}

# Names of modules in strings that the table does not permit. This list can only shrink, too.
HIDDEN_IMPORTS = {"workbench/store/cluster_spec.py: workbench.server"}
IN_A_STRING = re.compile(r"workbench(\.\w+)+\.?(:\w+)?")

MOST_MODULES = 15
GENERATED = {"node_modules", "bundle", "__pycache__"}


def files(folder: str) -> list[Path]:
    return sorted(
        path
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and not GENERATED.intersection(path.parts)
        and not any(part.startswith(".") for part in path.relative_to(ROOT / folder).parts)
    )


def modules() -> list[Path]:
    """Every module that lies in one of the house's folders."""
    inside = (path for path in files("workbench") if path.suffix == ".py")
    return [path for path in inside if path.parent != ROOT / "workbench"]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(source: str, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of what a module of `package` imports, wherever it does."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*start, *filter(None, [node.module])])
            if module == "workbench":  # the names are folders, or the facade's
                yield from ((node.lineno, f"workbench.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def violations(source: str, package: tuple[str, ...]) -> list[str]:
    here, found = package[1], []
    for line, target in imported(source, package):
        top, _, rest = target.partition(".")
        if top == "workbench":
            folder = rest.split(".")[0]
            if here != folder and folder not in MAY_IMPORT[here] and here != "bench":
                allowed = ", ".join(sorted(MAY_IMPORT[here])) or "nothing"
                found.append(f"line {line}: {here} may import {allowed} of ours, not {target}")
        elif here not in LIVES_IN.get(top, {here}):
            homes = ", ".join(sorted(LIVES_IN[top]))
            found.append(f"line {line}: {top} is for {homes}, not for {here}")
    return found


def test_imports_follow_the_table():
    strangers = {path.relative_to(ROOT).parts[1] for path in modules()} - {*MAY_IMPORT}
    assert not strangers, (
        f"no folders of the house (see MAY_IMPORT): {', '.join(sorted(strangers))}"
    )
    found = [
        f"{name(path)}, {each}"
        for path in modules()
        for each in violations(path.read_text("utf-8"), path.parent.relative_to(ROOT).parts)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import workbench.comm",
        "import workbench.comm.groups.group as g",
        "import workbench",
        "from workbench import comm",
        "from workbench import Cluster",
        "from workbench.comm import Group",
        "from workbench.comm.groups.group import Group",
        "from .. import comm",
        "from ..comm import Group",
        "from ..comm.group import Group",
        "def f():\n    from workbench.comm import Group",
        "if TYPE_CHECKING:\n    from workbench.comm import Group",
        "import torch",
        "import torch.nn as nn",
        "from torch.nn import functional",
    ],
)
def test_the_table_sees_every_form_of_import(source):
    assert len(violations(source, ("workbench", "plan"))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from workbench import plan",
        "from workbench.plan.graph import Graph",
        "from . import graph",
        "from .graph import Graph",
        "from ..plan import Graph",
        "import numpy",
        "import torchmetrics",
    ],
)
def test_the_table_permits_what_it_should(source):
    assert violations(source, ("workbench", "plan")) == []


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_what_the_registry_says(task):
    assert TASKS[task].room in MAY_IMPORT["engine"] | {"engine"}
    module, function = place_of(task)
    parameters = inspect.signature(getattr(import_module(module), function)).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    assert takes_all or parameters.keys() >= {*TASKS[task].keywords}


@pytest.mark.slow
@pytest.mark.parametrize("folder", WITHOUT_TORCH)
def test_does_not_load_torch(folder):
    """Not even through somebody else: plans are handled in processes that never need torch."""
    members = [
        name(path).removesuffix(".py").replace("/", ".")
        for path in modules()
        if path.relative_to(ROOT).parts[1] == folder and path.stem not in ("__init__", "__main__")
    ]
    if not members:
        pytest.skip(f"workbench/{folder} is still empty")
    assert loaded_with("workbench", f"workbench.{folder}", *members).isdisjoint(LIVES_IN)


def test_folders_can_be_taken_in():
    folders = Counter(path.parent for path in modules() if not path.name.startswith("__"))
    found = [f"{name(folder)}: {n} modules" for folder, n in folders.items() if n > MOST_MODULES]
    assert not found, "\n".join([*found, "parts of them belong in a folder"])


def graph_of_imports() -> dict[str, set[str]]:
    """The modules that each module imports, even for the checker of types alone, or late."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in modules()}
    imports = {}
    for module, path in paths.items():
        tree = ast.parse(path.read_text("utf-8"))
        named = {
            target
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
            for target in (node.module, f"{node.module}.{alias.name}")
        }
        plain = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        imports[module] = (named | plain) & paths.keys()
    return imports


def in_circles(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """What remains when all that lies before or behind every circle is taken away."""
    while ends := {module for module, targets in imports.items() if not targets}:
        imports = {m: targets - ends for m, targets in imports.items() if m not in ends}
    while starts := imports.keys() - set().union(*imports.values()):
        imports = {m: targets for m, targets in imports.items() if m not in starts}
    return imports


def test_no_module_imports_itself():
    """Not even through others."""
    found = in_circles(graph_of_imports())
    assert not found, f"in circles of imports: {', '.join(sorted(found))}"


def test_folders_form_no_circle():
    """Nor do folders, where one counts with the modules that lie in it directly."""
    folders: dict[str, set[str]] = {}
    for module, targets in graph_of_imports().items():
        if not module.endswith("__init__"):
            here, *there = ("/".join(each.split(".")[1:-1]) for each in (module, *targets))
            folders.setdefault(here, set()).update(set(there) - {here})
    for folder in folders:
        folders[folder] &= folders.keys()
    for known in FOLDERS_IN_CIRCLES.values():
        left = in_circles({folder: folders.get(folder, set()) & known for folder in known})
        assert known == left.keys(), f"in no circle any more: {', '.join(known - left.keys())}"
        for folder in known:
            folders[folder] -= known
    found = in_circles(folders)
    assert not found, f"in circles of folders: {', '.join(sorted(found))}"


def test_what_strings_name_is_there_and_follows_the_table():
    """An import that hides in a string: "workbench.room.module:function"."""
    wrong, hidden = [], set()
    for path in modules():
        here = path.relative_to(ROOT).parts[1]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else None
            if not isinstance(text, str) or not IN_A_STRING.fullmatch(text):
                continue
            module, _, function = text.rstrip(".").partition(":")
            place = ROOT / module.replace(".", "/")
            source = place.with_suffix(".py") if not place.is_dir() else place / "__init__.py"
            if not source.exists() or (function and function not in defined(source)):
                wrong.append(f"{name(path)}, line {node.lineno}: there is no {text}")
            room = module.split(".")[1]
            if here not in (room, "bench") and room not in MAY_IMPORT[here]:
                hidden.add(f"{name(path)}: {module}")
    assert not wrong, "\n".join(wrong)
    assert not hidden - HIDDEN_IMPORTS, "\n".join(sorted(hidden - HIDDEN_IMPORTS))
    assert not HIDDEN_IMPORTS - hidden, f"gone: {', '.join(sorted(HIDDEN_IMPORTS - hidden))}"


def defined(path: Path) -> set[str]:
    """The functions and classes of a module."""
    body = ast.parse(path.read_text("utf-8")).body
    return {node.name for node in body if isinstance(node, INNER) and hasattr(node, "name")}


def test_what_is_raised_is_documented():
    """In the docstring of what raises it, or its class's; who has none does what its base says."""
    public = {*wb.__all__, *wb.extend.__all__, *dir(comm)}
    missing = [
        f"{name(path)}, line {function.lineno}: {function.name}"
        for path in modules()
        for node in ast.parse(path.read_text("utf-8")).body
        if getattr(node, "name", "") in public
        for function, told in documented(node)
        if "Raises" not in told and any(map(is_error, own(function)))
    ]
    assert not missing, "\n".join(["functions without `Raises:`", *missing])


def documented(node: ast.AST) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """A function with a docstring; of a class public methods, and the constructor with its own."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if text := ast.get_docstring(node):
            yield node, text
    elif isinstance(node, ast.ClassDef):
        for child in node.body:
            if getattr(child, "name", "") == "__init__":
                yield child, (ast.get_docstring(child) or ast.get_docstring(node) or "Raises")
            elif not getattr(child, "name", "_").startswith("_"):
                yield from documented(child)


TAG = re.compile(
    r"</?(a|b|body|br|circle|details|div|g|h[1-6]|html|img|li|ol|p|path|pre|rect|script|span|style"
    r"|summary|svg|table|tbody|td|text|th|thead|tr|ul)\b[^<>]*>"
)


def tags(source: str) -> list[str]:
    """The tags in the texts of a module, but for what is documentation."""
    tree = ast.parse(source)
    told = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        f"line {node.lineno}: {found[0]}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in told
        if (found := TAG.search(node.value))
    ]


def test_markup_is_made_in_one_place():
    """Which escapes: `element` of plan/io/html.py; and `Markup` says that something was."""
    found = [
        f"{name(path)}, {each}"
        for path in modules()
        if name(path) not in ("workbench/plan/io/html.py", "workbench/plan/display/svg.py")
        for source in [path.read_text("utf-8")]
        for each in [*tags(source), *(["Markup("] if "Markup(" in source else [])]
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("f'<p style=\"a\">{x}'", ['line 1: <p style="a">']),
        ("x = y + '</td>'", ["line 1: </td>"]),
        ("def f():\n    '<p>'", []),
        ("x = ['<module>', 'a <b', '<Plan of b>', 'train/<class>/*']", []),
    ],
)
def test_tags_are_found_in_texts(source, found):
    assert tags(source) == found


def own(node: ast.AST) -> Iterator[ast.AST]:
    """What is in a function, but for functions in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, INNER):
            yield from (child, *own(child))


def is_error(node: ast.AST) -> bool:
    """Whether an error is raised here by its name."""
    made = node.exc.func if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else None
    return isinstance(made, ast.Name) and made.id[0].isupper() and made.id not in NOT_TOLD


def test_the_facade_loads_nothing():
    assert loaded_with("workbench").isdisjoint({*LIVES_IN, "numpy", "pandas", "pydantic"})


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("workbench.store.store", {"torch", "ipyparallel", "scipy"}),
        ("workbench.scheduler.scheduling", {"torch", "ipyparallel", "scipy", "sqlite3"}),
        ("workbench.supervisor.__main__", {"torch", "ipyparallel", "scipy"}),
        ("workbench.server.__main__", {"torch", "scipy"}),
        ("workbench.engine.calls", {"ipyparallel", "scipy", "sqlite3"}),
    ],
)
def test_a_process_begins_with_what_it_needs(module, without):
    """Supervisor and server stay small, and start before anything that takes seconds to import."""
    assert loaded_with(module).isdisjoint(without)


def test_nothing_of_ours_runs_whenever_python_starts():
    assert not [
        path for folder in ("env", "workbench") for path in files(folder) if path.suffix == ".pth"
    ]


@pytest.mark.slow
def test_processes_hold_what_they_need(tmp_path):
    """The kernel says so, after a step of training; Python's own list is of this process only.

    An engine has IPython's history in SQLite.
    """
    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc, which says what another process has loaded")
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    graph = wb.trace(module, input_shape=(3, 2, 2), num_classes=10)
    experiment = wb.Experiment(
        plan=wb.Plan.data_parallel(graph, 1),
        data=wb.Synthetic(samples=8),
        batch_size=4,
        optimizer=wb.SGD(lr=0.1),
        steps=1,
    )
    with wb.Cluster(1, directory=tmp_path) as cluster:
        cluster.train(experiment, module=module).wait(60.0)
        supervisor = supervisor_of(cluster.link.folder)
        assert supervisor is not None
        first = psutil.Process(supervisor.pid)
        processes = [first, *first.children(recursive=True)]
        found = {what: mapped(processes, what) for what in DOES_WITHOUT}
    for what, without in DOES_WITHOUT.items():
        assert "numpy" in found[what], f"{what} is not there"
        assert found[what].isdisjoint(without), f"{what} holds {found[what] & without}"


def mapped(processes: list[psutil.Process], what: str) -> set[str]:
    """The packages with libraries in the memory of those processes that run a module."""
    maps = [Path(f"/proc/{p.pid}/maps").read_text() for p in processes if what in p.cmdline()]
    return set(re.findall(r"/(?:site|dist)-packages/(\w+)/", "".join(maps)))


def loaded_with(*names: str) -> set[str]:
    """What a fresh interpreter holds after importing these."""
    code = f"import {', '.join(names)}, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_a_folder_s_init_names_its_public_face_only():
    """Its own names; those that are loaded when they are first used are said twice."""
    late = {"import_module", "TYPE_CHECKING", "Any", "_HOME", "__getattr__", "__dir__"}
    for path in (path for path in modules() if path.name == "__init__.py"):
        package = path.parent.relative_to(ROOT).parts
        first, *rest = ast.parse(path.read_text("utf-8")).body
        assert isinstance(first, ast.Expr), f"{name(path)} begins with no docstring"
        for node in rest:
            assert names(node) <= {"__all__", *late} or isinstance(node, ast.ImportFrom), (
                f"{name(path)}, line {node.lineno}: only names and how they are found belong here"
            )
        strangers = [
            f"line {line}: {target}"
            for line, target in imported(path.read_text("utf-8"), package)
            if not f"{target}.".startswith((".".join(package) + ".", "importlib.", "typing."))
        ]
        assert not strangers, "\n".join([f"{name(path)} names what is not its own", *strangers])


def names(node: ast.stmt) -> set[str]:
    """What a statement at the top of a module defines, or asks for."""
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {ast.unparse(target) for target in node.targets}
    return {ast.unparse(node.test)} if isinstance(node, ast.If) else {ast.unparse(node)}


def test_the_tests_mirror_the_house():
    places = [path.relative_to(ROOT) for path in files("tests") if path.name.startswith("test_")]
    tested = {place.parts[1] for place in places if len(place.parts) > 2}
    others = {"env", "faults", "gpu", "mutants", "notebooks", "oracle"}  # for all together
    assert tested <= {*MAY_IMPORT, *others}, "a folder of tests with nothing to test"
    untested = {path.parent.relative_to(ROOT).parts[1] for path in modules()} - tested
    assert not untested, f"no tests for {', '.join(sorted(untested))}"


ORACLE = ("oracle.py", "draws.py", "models.py", "blocks.py", "one_row.py")


@pytest.mark.parametrize("file", ORACLE)
def test_the_oracle_shares_no_code(file):
    """Nor does what it imports of the tests."""
    source = (ROOT / "tests" / "oracle" / file).read_text("utf-8")
    ours = [
        t for _, t in imported(source, ("tests", "oracle")) if t.startswith(("workbench", "tests"))
    ]
    assert {t.removeprefix("tests.oracle.").split(".")[0] + ".py" for t in ours} <= set(ORACLE)


def test_the_top_level_holds_only_what_belongs_there():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: what belongs to the project is not known")
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = {line.strip('"').split("/")[0] for line in listing.splitlines()}
    assert found <= TOP_LEVEL, f"does not belong at the top: {', '.join(sorted(found - TOP_LEVEL))}"
