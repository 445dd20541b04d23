"""Weights & Biases, against a recorder of the calls that its package takes."""

import sys
from types import ModuleType

import pytest

import workbench as wb
from workbench.client.loggers.feed import Feed
from workbench.client.loggers.logger import loggers


class Recorder:
    """Notes every call, by name; gives itself."""

    def __init__(self, **attributes):
        self.calls = []
        vars(self).update(attributes)

    def __getattr__(self, name):
        def call(*arguments, **keywords):
            self.calls.append((name, arguments, keywords))
            return self

        return call

    def of(self, name):
        return [(arguments, keywords) for each, arguments, keywords in self.calls if each == name]


@pytest.fixture
def package(monkeypatch):
    """`package("wandb", init=...)`: a package of that name that has these."""

    def package(name, **attributes):
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)

    monkeypatch.setattr("workbench.client.records.optional.find_spec", lambda _name: True)
    return package


def go(played, logger, state="finished"):
    played.subscribe(Feed(played, loggers(logger)))
    played.step(0, loss=2.0)
    played.step(1, loss=1.0)
    played.end(state, accuracy=0.75)
    assert played.notes == []


@pytest.mark.parametrize(("state", "status"), [("finished", 0), ("failed", 1)])
def test_weights_and_biases(played, package, state, status):
    summary = {}
    run, opened = Recorder(summary=summary), Recorder()
    package("wandb", init=lambda **keywords: opened.init(**keywords) and run)
    go(played, wb.WandB("mine", offline=True, settings={"tags": ["a"]}), state)
    ((_, keywords),) = opened.of("init")
    assert (keywords["project"], keywords["mode"], keywords["tags"]) == ("mine", "offline", ["a"])
    assert keywords["name"] == played.directory.name
    assert keywords["id"].startswith(played.directory.name + "-")
    assert keywords["config"]["optimizer"] == played.experiment.optimizer.kind
    assert [step["loss"] for (step,), _ in run.of("log")] == [2.0, 1.0]
    assert [step["step"] for (step,), _ in run.of("log")] == [0, 1]
    assert summary == {"state": state, "test_accuracy": 0.75}
    assert run.of("finish") == [((), {"exit_code": status})]
