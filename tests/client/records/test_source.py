"""Whose code it was: the repository, a module's classes, and the notebook or command."""

import copy
import functools
import subprocess
import sys
import types

import pytest
from IPython.core.interactiveshell import InteractiveShell
from torch import nn

from workbench.client.records.source import Repository, repository, sources, submitted_by
from workbench.plan.experiment.task import Loss


class Doubled(nn.Module):
    """A module of this file."""

    def forward(self, x):
        return x + x


def git(folder, *arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(folder), *who, *arguments]
    subprocess.run(command, check=True, capture_output=True)


def test_a_repository_says_its_commit_and_whether_it_was_changed(tmp_path):
    assert repository(tmp_path) is None
    git(tmp_path, "init", "-b", "trunk")
    assert repository(tmp_path) == Repository("", "trunk", False)
    (tmp_path / "model.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "new").write_text("")
    clean = repository(tmp_path / "runs")
    assert len(clean.commit) == 40
    assert clean == Repository(clean.commit, "trunk", False)
    (tmp_path / "model.py").write_text("a = 2\n")
    assert repository(tmp_path) == Repository(clean.commit, "trunk", True)


def test_without_git_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert repository(tmp_path) is None


def test_a_person_s_own_classes_are_told_each_once_and_torch_s_are_not():
    (found,) = sources(nn.Sequential(Doubled(), nn.ReLU(), Doubled()), Loss(nn.L1Loss()))
    assert found.name == "Doubled"
    assert found.text.startswith("class Doubled(nn.Module):")
    assert "return x + x" in found.text
    assert found.place.startswith(f"{__file__}, line ")


def squared(outputs, targets):
    return (outputs - targets).square().mean()


def test_what_an_experiment_has_of_one_s_own_is_told_too():
    loss = Loss(Doubled(), weights=squared)
    module, function = sources(None, loss)
    assert (module.name, function.name) == ("Doubled", "squared")
    assert function.text.startswith("def squared(outputs, targets):")


def scaled(x):
    return 2 * x


@functools.lru_cache
def factors(count):
    return [each(1) for each in (lambda x: scaled(x),) * count]


class Based:
    """What another extends."""


class Helped(Based):
    """A loss that calls others."""

    @staticmethod
    def gamma():
        return factors(1)

    @property
    def steps(self):
        return extension.schemes_of(self)  # noqa: F821 (a module that the test makes)

    def __call__(self, outputs, targets):
        return self.gamma() * squared(outputs, targets)


def test_what_they_call_is_told_too_but_for_packages(monkeypatch):
    own = types.ModuleType("own_helpers")
    exec("def schemes_of(loss):\n    return deepcopy(loss)", vars(own))
    own.deepcopy = copy.deepcopy
    monkeypatch.setitem(globals(), "extension", own)
    found = [each.name for each in sources(None, Loss(Helped()))]
    assert found == ["Helped", "Based", "factors", "schemes_of", "squared", "scaled"]


@pytest.fixture
def shell():
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def test_a_cell_s_class_is_told_with_its_cell(shell, monkeypatch):
    text = "import functools\n@functools.cache\ndef f(): ...\nclass Tripled(nn.Module):\n"
    text += "    def forward(self, x):\n        return 3 * x\n"
    monkeypatch.setitem(sys.modules, "__main__", shell.user_module)
    shell.user_ns |= {"nn": nn}
    shell.run_cell("%precision 3\n" + text, store_history=True).raise_error()
    model, loss = shell.user_ns["Tripled"](), shell.user_ns["f"].__wrapped__
    found, function = sources(model, Loss(loss))
    assert (found.name, found.place) == ("Tripled", "Cell In[1]")
    assert found.text == text[text.index("class") :]
    assert (function.place, function.text) == ("Cell In[1]", "@functools.cache\ndef f(): ...\n")


def test_a_notebook_is_named_where_one_submits(shell):
    assert submitted_by() == "an IPython session without a name"
    shell.user_ns["__session__"] = "lab/first.ipynb"
    assert submitted_by() == "lab/first.ipynb"


def test_elsewhere_the_command_is_named(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "workbench", "run", "x.toml"])
    assert submitted_by() == "python -m workbench run x.toml"
