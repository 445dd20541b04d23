"""What a text names is imported, looked up and called with its reader's trust alone."""

import importlib
import sys
import tomllib
from pathlib import Path

import pytest
import tomlkit

from tests.plan.graphs import mlp, vgg
from workbench.plan import SGD, Experiment, Plan
from workbench.plan.extension.user_object import OwnObjectError
from workbench.plan.io.errors import ExperimentError, PlanError

PLANTED = """
from pathlib import Path
from workbench.plan.placement.schemes import Scheme

def tell(*what):
    with Path("executed").open("a") as file:
        print(*what, file=file)

tell("imported")

class Thing:
    def __init__(self, *_):
        tell("called")
    def __len__(self):
        tell("asked")
        return 8
    __getitem__ = __call__ = __init__

def thing(*_):
    return Thing()
"""
OFFERED = ("algorithms", "codecs", "data", "schemes", "strategies")
EXPERIMENT = Experiment(
    plan=Plan.data_parallel(mlp(4, 4), 2), data="digits", optimizer=SGD(lr=0.1), steps=3
)
NAMED = {"name": "planted:Thing"}
CODED = {"own": NAMED, "error_feedback": False}
STATED = {"kind": "own", "given": NAMED, "states": {"every": 2}}

READ = [
    ("data", "planted:thing"),
    ("data", {"kind": "torch", "train": NAMED, "test": NAMED, "samples": [8, 4]}),
    ("data", {"kind": "torch", "train": "planted:thing", "collate": "planted:thing"}),
    ("loss", "planted:thing"),
    ("loss", {"function": "planted:Thing", "weights": NAMED}),
    ("metrics", {"f1": "planted:Thing"}),
    ("metrics", {"f1": {"sums": NAMED, "result": "planted:Thing"}}),
    ("schedule", "planted:thing"),
    ("schedule", {"kind": "function", "function": NAMED}),
    ("sync", {"kind": "synchronous", "algorithm": "planted:Thing"}),
    ("sync", {"kind": "synchronous", "algorithm": "planted_algorithms"}),
    ("sync", {"kind": "pipelined", "algorithm": NAMED, "codec": CODED}),
    ("sync", STATED),
    ("sync", {**STATED, "given": "planted_strategies"}),
]
REFUSED = [  # what they say of themselves is not in the text
    ("data", "planted_data"),
    ("sync", "planted:Thing"),
    ("sync", "planted_strategies"),
    ("sync", {"kind": "synchronous", "codec": "planted:Thing"}),
    ("sync", {"kind": "synchronous", "codec": {"own": NAMED}}),
    ("sync", {"kind": "pipelined", "codec": "planted_codecs"}),
]


@pytest.fixture(params=["not imported", "imported"])
def planted(request, tmp_path, monkeypatch):
    """A module that says when it is imported or called, and which is installed; `executed()`."""
    (tmp_path / "planted.py").write_text(PLANTED)
    installed = tmp_path / "planted-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    groups = (f"[workbench.{kind}]\nplanted_{kind} = planted:Thing\n" for kind in OFFERED)
    (installed / "entry_points.txt").write_text("\n".join(groups))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    if request.param == "imported":
        importlib.import_module("planted")
        Path("executed").unlink()
    yield lambda: Path("executed").exists()
    sys.modules.pop("planted", None)


def text(field: str, value: object) -> str:
    content = tomllib.loads(EXPERIMENT.to_toml())
    content["experiment"][field] = value
    return tomlkit.dumps(content)


@pytest.mark.parametrize(("field", "value"), READ)
def test_an_experiment_is_read_shown_changed_and_written(planted, field, value):
    read = Experiment.from_toml(text(field, value))
    assert repr(read)
    assert read._repr_html_()
    assert read.to_frame() is not None
    more = read.replace(steps=5)
    assert (more.steps, read == more) == (5, False)
    assert Experiment.from_toml(read.to_toml()) == read
    assert not planted()


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_what_cannot_be_read_without_the_object_says_so(planted, field, value):
    with pytest.raises(ExperimentError, match=rf"{field}.* was not imported: .* trust=True"):
        Experiment.from_toml(text(field, value))
    assert not planted()


def plan_text(scheme: object) -> str:
    content = tomllib.loads(Plan.hybrid(vgg(), 4, 2).to_toml())
    for entry in content["layers"].values():
        entry["scheme"] = scheme
    return tomlkit.dumps(content)


SCHEMES = ["planted:Thing", NAMED, "planted_schemes"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_plan_is_read_shown_changed_and_written(planted, scheme):
    read = Plan.from_toml(plan_text(scheme))
    assert not read.is_at_hand
    assert "Thing/2" in repr(read)
    assert "read without trust=True" in str(read) + read._repr_html_()
    assert read.with_layer("fc0", recompute=True) != read
    assert Plan.from_toml(read.to_toml()) == read
    assert not planted()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_follows_from_a_plan_names_the_layer_and_the_remedy(planted, scheme):
    read = Plan.from_toml(plan_text(scheme))
    with pytest.raises(PlanError, match=r"layers\.fc0\.scheme, .* trust=True .* give the object"):
        _ = read.flow
    assert not planted()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_with_trust_a_scheme_is_called(planted, scheme):
    with pytest.raises(PlanError, match="is none of the schemes"):
        Plan.from_toml(plan_text(scheme), trust=True)
    assert planted()


def test_an_experiment_trusts_no_more_in_its_plan(planted):
    content = tomllib.loads(plan_text("planted:Thing"))
    content |= {"experiment": tomllib.loads(EXPERIMENT.to_toml())["experiment"]}
    read = Experiment.from_toml(tomlkit.dumps(content))
    assert not read.plan.is_at_hand
    assert not planted()


def test_what_needs_the_object_names_the_field_and_the_remedy(planted):
    read = Experiment.from_toml(text("loss", "planted:thing"))
    said = r"'planted:thing' is named in a text, as loss, .* trust=True .* give the object"
    with pytest.raises(OwnObjectError, match=said):
        _ = read.loss.function.loaded
    assert not planted()


@pytest.mark.parametrize(("field", "value"), [READ[0], READ[3], REFUSED[0]])
def test_with_trust_the_object_is_there(planted, field, value):
    read = Experiment.from_toml(text(field, value), trust=True)
    own = read.data.train if field == "data" else read.loss.function
    assert own.is_at_hand
    assert own.loaded.__module__ == "planted"


def test_files_are_read_alike(planted, tmp_path):
    (tmp_path / "plan.toml").write_text(plan_text("planted:Thing"))
    assert not Plan.load(tmp_path / "plan.toml").is_at_hand
    (tmp_path / "experiment.toml").write_text(text("loss", "planted:thing"))
    assert not Experiment.load(tmp_path / "experiment.toml").loss.function.is_at_hand
    assert not planted()
    assert Experiment.load(tmp_path / "experiment.toml", trust=True).loss.function.is_at_hand
