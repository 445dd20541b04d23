"""Reading is not running: the only modules that unpickle, execute, or look up a name they read."""

import ast

import pytest

from tests.test_architecture import ROOT, modules

MAY = {
    "plan/extension/sealed.py": {"pickle"},  # under a MAC
    "plan/extension/user_object.py": {"import_module"},  # with its reader's trust
    "client/run/own_objects.py": {"cloudpickle"},  # writes
    "model/build.py": {"cloudpickle"},  # writes
    "train/run/cells.py": {"exec", "eval"},  # a person's cell
    "store/tasks.py": {"import_module"},  # what an engine is called for, on the engine
    "train/data/copied.py": {"pickle", "cloudpickle"},  # what this process has
    "supervisor/spawn.py": {"import_module", "run_module"},  # as the cluster's supervisor says
    "model/packages.py": {"import_module"},  # one of two
    "hosts/host.py": {"exec_module"},  # torch's own version
    "hosts/remote/wire.py": {"getattr"},  # constants of its own
    "train/optimizer/state.py": {"getattr"},  # out of a table of schedulers
    "model/record/layers.py": {"getattr"},  # by the names of live classes
    "model/record/patches.py": {"getattr"},  # constants of its own
}
PICKLERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
BUILT_IN = {"eval", "exec", "__import__"}
EXECUTES = {"exec_module", "resolve_name", "locate", "run_path", "run_module"}
LOADS = {"torch.load", "np.load", "numpy.load", "pandas.read_pickle", "yaml.load"}


def found(source: str) -> set[str]:
    """The ways in which a module may run what it reads, or look up a name that it reads."""
    tree, ways = ast.parse(source), set[str]()
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    known = {(a.asname or a.name).partition(".")[0] for node in imports for a in node.names}
    for node in imports:
        ways |= PICKLERS & {getattr(node, "module", None), *(alias.name for alias in node.names)}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called, first = ast.unparse(call.func), ast.unparse(call.args[0]) if call.args else ""
        last = called.rpartition(".")[2]
        if called in BUILT_IN | LOADS or last in EXECUTES:
            ways.add(last)
        if last == "import_module" and not first.startswith(("'", "f'workbench.")):
            ways.add(last)
        if called == "getattr" and not isinstance(call.args[1], ast.Constant):
            of = first.partition(".")[0]
            ways |= {called} if of in known and of[:1].islower() | (of in ("F", "nn")) else set()
    return ways


def test_modules_run_what_they_read_where_they_may_only():
    ways = {
        path.relative_to(ROOT / "workbench").as_posix(): found(path.read_text("utf-8"))
        for path in modules()
    }
    assert {k: v for k, v in ways.items() if v and not k.startswith("bench/")} == MAY


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import loads", "eval('1')", "torch.load(f)", "np.load(f)"),
        *("import_module(f'{x}')", "importlib.import_module(x)", "import os\ngetattr(os, x)"),
        *("pydoc.locate(x)", "__import__(x)", "loader.exec_module(x)"),
    ],
)
def test_every_way_is_found(source):
    assert found(source)


@pytest.mark.parametrize(
    "source", ["model.eval()", "import_module('torchvision')", "getattr(self, x)", "json.load(f)"]
)
def test_nothing_else_is(source):
    assert not found(source)
