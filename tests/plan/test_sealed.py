"""One module unpickles, and only what is under a MAC or was pickled by this process."""

import ast
import pickle
from pathlib import Path

import pytest
import torch

from workbench.plan.extension import sealed
from workbench.plan.extension.sealed import KEY_BYTES, SealError

WORKBENCH = Path(sealed.__file__).parents[2]
ONE, OTHER = bytes(KEY_BYTES), bytes(range(KEY_BYTES))
EXECUTES = {"eval", "exec"}
# What a person types into a cell, or at the command line of the benchmarks, is executed for them.
TYPED = {"train/cells.py"}
# pickle writes in these; `cloudpickle` can write what `pickle` cannot
WRITES = {"client/run/own_objects.py", "model/build.py"}


def test_a_value_comes_back_under_its_own_key_alone():
    packed = sealed.pack({"a": 1}, ONE)
    assert sealed.unpack(packed, ONE) == {"a": 1}
    with pytest.raises(SealError, match="not written under this cluster's key"):
        sealed.unpack(packed, OTHER)
    for place in (0, 31, 32, len(packed) - 1):
        changed = bytearray(packed)
        changed[place] ^= 1
        with pytest.raises(SealError):
            sealed.unpack(bytes(changed), ONE)
    with pytest.raises(SealError):
        sealed.unpack(b"", ONE)


def test_torchs_constants_come_back():
    for one in (torch.float16, torch.strided, torch.channels_last, torch.contiguous_format):
        assert sealed.loads(pickle.dumps(one)) is one


@pytest.mark.parametrize("key", [b"", b"short"])
def test_without_a_key_nothing_is_sealed_or_opened(key):
    for call in (lambda: sealed.pack(1, key), lambda: sealed.unpack(sealed.pack(1, ONE), key)):
        with pytest.raises(ValueError, match="a key has 32 bytes"):
            call()


def test_a_process_that_is_no_engine_opens_nothing(monkeypatch):
    monkeypatch.delenv(sealed.KEY_FILE, raising=False)
    with pytest.raises(SealError, match="only engines open"):
        sealed.own_key()


@pytest.mark.parametrize(
    "path", sorted(WORKBENCH.rglob("*.py")), ids=lambda path: str(path.relative_to(WORKBENCH))
)
def test_no_other_module_unpickles_or_executes_what_it_reads(path):
    name = path.relative_to(WORKBENCH).as_posix()
    tree = ast.parse(path.read_text("utf-8"))
    found = [f"line {line}: {what}" for line, what in suspicious(tree)]
    if path == Path(sealed.__file__) or name in TYPED or name.startswith("bench/"):
        return
    if name in WRITES:
        found = [each for each in found if not each.endswith("import cloudpickle")]
    assert not found, "\n".join(found)


def suspicious(tree: ast.AST):
    """(line, what) of each way to execute bytes or text."""
    picklers = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names} & picklers
            yield from ((node.lineno, f"import {name}") for name in names)
        elif isinstance(node, ast.ImportFrom) and node.module in picklers:
            yield node.lineno, f"from {node.module}"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in EXECUTES or called in ("torch.load", "cloudpickle.loads", "np.load"):
                yield node.lineno, called


@pytest.mark.parametrize(
    "source", ["import pickle", "from pickle import loads", "eval('1')", "torch.load(f)"]
)
def test_every_form_is_seen(source):
    assert len(list(suspicious(ast.parse(source)))) == 1
