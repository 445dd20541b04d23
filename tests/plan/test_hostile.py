"""What the author of a file can do: nothing but give an error, or a value that is safe to show.

`python -m tests.plan.test_hostile 10000` tries that many files.
"""

import os
import sys
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import tomlkit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.plan.graphs import mlp, transformer, vgg
from tests.plan.machines import machine
from workbench.plan import SGD, Experiment, Machine, Plan
from workbench.plan.errors import ExperimentError, MachineError, PlanError
from workbench.plan.graph import Graph

MARKUP = ("<xss onload=x>", "\"'><xss>", "</td><xss>", "&lt;xss", "javascript:xss")
LEAVES = st.one_of(
    st.sampled_from(MARKUP),
    st.sampled_from(["", "../../etc/passwd", "/dev/zero", "\x00", "\u202e", "a" * 10_000, "nan"]),
    st.sampled_from([0, -1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400]),
    st.sampled_from([0.0, -0.0, 1e308, -1e308, float("inf"), float("nan"), 5e-324]),
    st.sampled_from([True, False, date(2000, 1, 1), [], {}, [[]], ["<xss>"], [0], {"<xss>": 0}]),
    st.integers(),
    st.floats(),
    st.text(),
)


def texts() -> dict[str, tuple[type, str]]:
    plans = {
        "vgg": Plan.hybrid(vgg(), 4, 2),
        "attention": Plan.hybrid(transformer(), 2),
        "mlp": Plan.data_parallel(mlp(4, 4), 2, shares=(1.0, 2.0)),
    }
    experiment = Experiment(plan=plans["mlp"], optimizer=SGD(lr=0.1), steps=3, data="synthetic")
    found: dict[str, tuple[type, str]] = {name: (Plan, p.to_toml()) for name, p in plans.items()}
    found["experiment"] = (Experiment, experiment.to_toml())
    found["machine"] = (Machine, machine().to_toml())
    return found


TEXTS = texts()


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of each value, of tables and lists as of what is in them."""
    if place:
        yield place
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*place, key))


@st.composite
def hostile_texts(draw: Callable[..., Any]) -> tuple[type, str]:
    """A text in which one to three values are others, or have other names."""
    kind, text = TEXTS[draw(st.sampled_from(sorted(TEXTS)))]
    content = tomllib.loads(text)
    for _ in range(draw(st.integers(1, 3))):
        *around, last = draw(st.sampled_from(list(leaves(content))))
        held = content
        for key in around:
            held = held[key]
        if isinstance(held, dict) and draw(st.integers(0, 4)) == 0:
            held[draw(st.sampled_from([*MARKUP, "plan", "kind", "self", "__class__"]))] = held[last]
        else:
            held[last] = deepcopy(draw(LEAVES))  # else a list may come to lie in itself
    return kind, tomlkit.dumps(content)


def tried(kind: type, text: str) -> str:
    """What became of it: "refused" or "safe"."""
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, "given.toml")
        path.write_text(text, "utf-8")
        try:
            value = kind.load(path)
        except (PlanError, ExperimentError, MachineError) as error:
            return "refused" if str(error).startswith(f"{path}: ") else f"without its file: {error}"
        shown = value._repr_html_() if hasattr(value, "_repr_html_") else ""
        assert "<xss" not in shown
        assert repr(value)
        assert str(value)
        if isinstance(value, Plan):
            assert "<xss" not in value.graph._repr_html_()
            assert "<xss" not in value.svg()
        assert kind.from_toml(value.to_toml()) == value
    return "safe"


@pytest.fixture
def known_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    """The author knows how a model's description is signed off, and does so."""
    monkeypatch.setattr(Graph, "fingerprint", property(lambda self: "0" * 12))
    for name, (kind, text) in TEXTS.items():
        content = tomllib.loads(text)
        if "graph" in content:
            content["graph"]["fingerprint"] = "0" * 12
        monkeypatch.setitem(TEXTS, name, (kind, tomlkit.dumps(content)))


@pytest.mark.parametrize(
    ("was", "now"), [("output_shape = [64]", "output_shape = [0]"), ("heads = 3", "heads = 0")]
)
@pytest.mark.usefixtures("known_fingerprints")
def test_a_model_that_cannot_be_is_refused(was, now):
    told = [text.replace(was, now) for kind, text in TEXTS.values() if was in text]
    assert told
    for text in told:
        with pytest.raises(PlanError, match=r"\[graph\]: the layers cannot have these schemes"):
            Plan.from_toml(text)


@pytest.mark.slow
@pytest.mark.usefixtures("known_fingerprints")
def test_every_leaf_is_refused_or_safe():
    assert set(counted(200)) == {"refused", "safe"}


def counted(most: int) -> Counter[str]:
    found: Counter[str] = Counter()

    @settings(
        max_examples=most, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(hostile_texts())
    def check(given_text: tuple[type, str]) -> None:
        found[tried(*given_text)] += 1

    check()
    return found


@pytest.mark.parametrize(
    "content",
    [
        b"a = " + b"[" * 5000,
        b"a = " + b"1" * 5000,
        b"\xff\xfe\x00",
        b"",
        b"plan = 1",
        b"[plan]\nworld_size = 10_000_000_000\n[graph]",
    ],
)
@pytest.mark.parametrize("kind", [Plan, Experiment, Machine])
def test_what_is_no_such_text_is_told_with_its_file(tmp_path, kind, content):
    (tmp_path / "given.toml").write_bytes(content)
    with pytest.raises((PlanError, ExperimentError, MachineError), match=r"given\.toml: "):
        kind.load(tmp_path / "given.toml")


@pytest.mark.parametrize("kind", [Plan, Experiment, Machine])
def test_a_pipe_is_not_waited_for(tmp_path, kind):
    os.mkfifo(tmp_path / "given.toml")
    with pytest.raises((PlanError, ExperimentError, MachineError), match="no file of at most"):
        kind.load(tmp_path / "given.toml")


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        known_fingerprints.__wrapped__(patch)
        print(dict(counted(int(sys.argv[1]))))
