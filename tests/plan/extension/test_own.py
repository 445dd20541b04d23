"""Objects of a person's own: how they are named, compared and found again."""

import math
import sys

import pytest

from workbench.plan.experiment.task import Digits, TorchData
from workbench.plan.extension import user_object as owns
from workbench.plan.extension.extension import Check, Extension, extension_of, named
from workbench.plan.extension.sealed import KEY_BYTES, KEY_FILE, pack
from workbench.plan.extension.user_object import (
    Own,
    OwnObjectError,
    called,
    foreign,
    mapped,
    opened,
    taken,
)

ROWS = [1]


@pytest.fixture
def lying(tmp_path, monkeypatch):
    """A list in a file, as an engine finds it."""
    key = tmp_path / "key"
    key.write_bytes(b"k" * KEY_BYTES)
    monkeypatch.setenv(KEY_FILE, str(key))
    path = tmp_path / "object"
    path.write_bytes(pack([1, 2], owns.own_key()))
    return Own.of([0]).lying_in(str(path))


def test_an_object_is_called_by_its_module_and_class():
    assert str(Own.of(math.sqrt)) == "math.sqrt"
    assert str(Own.of(ROWS)) == "builtins.list"

    def inner():
        pass

    assert Own.of(inner).name.endswith(".test_an_object_is_called_by_its_module_and_class.inner")


def test_an_object_of_a_notebook_has_no_module():
    exec("def loss(): pass", cell := {"__name__": "__main__"})
    assert repr(Own.of(cell["loss"])) == "loss"


def test_what_is_given_becomes_an_own_object():
    assert taken(None) is None
    own = Own(name="math:sqrt")
    assert taken(own) is own
    assert taken("math:sqrt") == own
    assert taken({"name": "f", "file": "x"}) == Own(name="f", file="x")
    assert taken({"name": "f"}) == Own(name="f")
    held = {"name": "f", "more": 1}
    assert taken(held).held is held
    assert taken({"file": "x"}).held == {"file": "x"}


@pytest.mark.parametrize("text", ["math", "math:", ":sqrt", ""])
def test_a_text_that_is_no_place_is_refused(text):
    with pytest.raises(ValueError, match="no place to import from"):
        taken(text)


def test_what_is_called_must_be_an_object_that_can_be():
    assert called(None) is None
    assert called("math:sqrt").loaded is math.sqrt
    assert called(math.sqrt).held is math.sqrt
    assert called(states := {}.copy()).held is states  # it has `update`, as metrics do
    with pytest.raises(ValueError, match=r"is a class: give an object of it, Digits\(\.\.\.\)"):
        called(Digits)
    with pytest.raises(ValueError, match="list is no function"):
        called([1])


def test_objects_are_equal_by_file_then_identity_then_name():
    one, same, other = Own.of([1]), Own.of([1]), Own(name="builtins.list")
    assert one == one
    assert one != same
    assert one == other  # its object is elsewhere
    assert hash(one) == hash(same) == hash(other)
    assert one.lying_in("a") == same.lying_in("a")
    assert one.lying_in("a") != one.lying_in("b")
    assert Own(name="f", file="a") != Own(name="f")
    assert Own(name="f") != Own(name="g")
    assert one != "builtins.list"


def test_a_name_with_a_module_is_imported():
    own = Own(name="math:sqrt")
    assert own.is_imported
    assert own.is_at_hand
    assert own.held is None
    assert own.loaded is math.sqrt
    assert Own(name="os:path.join").loaded is sys.modules["os"].path.join
    assert own.opened() is own


def test_what_is_held_or_lies_in_a_file_is_not_imported():
    assert not Own.of([1]).is_imported
    assert not Own(name="math:sqrt", file="x").is_imported
    assert not Own(name="sqrt").is_imported
    assert Own.of([1]).is_at_hand
    assert not Own(name="sqrt").is_at_hand


def test_what_a_text_names_is_neither_at_hand_nor_loaded():
    said = taken(foreign({"loss": "math:sqrt"})["loss"])
    assert said == Own(name="math:sqrt")
    assert not said.is_at_hand
    with pytest.raises(
        OwnObjectError, match=r"'math:sqrt' .* as loss, .* trust=True .* give the object"
    ):
        _ = said.loaded
    with pytest.raises(OwnObjectError, match="trust=True"):
        said.opened()
    assert Own(name="a_module_of_nobody:thing").is_at_hand


def test_all_strings_of_a_text_say_where_they_stand():
    said = foreign({"a": {"b": "x"}, "c": ["y", {"d": "z"}], "e": 5})
    assert said == {"a": {"b": "x"}, "c": ["y", {"d": "z"}], "e": 5}
    assert [s.place for s in (said["a"]["b"], said["c"][0], said["c"][1]["d"])] == [
        "a.b",
        "c",
        "c.d",
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a_module_of_nobody:thing", "ModuleNotFoundError"),
        ("math:no_such_thing", "AttributeError"),
        ("thing", "was an object of the process that made the experiment"),
    ],
)
def test_what_cannot_be_loaded_is_said_with_its_name(name, said):
    with pytest.raises(OwnObjectError, match=said) as raised:
        _ = Own(name=name).loaded
    assert repr(name) in str(raised.value)


def test_a_file_is_opened_by_the_process_that_runs_it(lying):
    away = Own(name=lying.name, file=lying.file)
    assert away.held is None
    assert away.opened().held == [1, 2]
    assert away.held is None
    assert lying.opened() is lying  # this process has the object
    assert lying.held == [0]


def test_a_file_of_another_key_is_not_opened(lying, tmp_path):
    path = tmp_path / "foreign"
    path.write_bytes(pack([1, 2], b"x" * KEY_BYTES))
    with pytest.raises(OwnObjectError, match="is not loaded"):
        Own(name="list", file=str(path)).opened()
    with pytest.raises(OwnObjectError, match="FileNotFoundError"):
        Own(name="list", file=str(tmp_path / "nowhere")).opened()


def test_a_missing_module_is_found_before_a_run_begins():
    with pytest.raises(OwnObjectError, match="ModuleNotFoundError"):
        Own(name="a_module_of_nobody:thing").opened()


def test_own_objects_are_changed_wherever_they_are():
    value = TorchData(train=ROWS, test=(2,))
    places = []

    def change(own, place):
        places.append(place)
        return own.lying_in(place)

    changed = mapped(value, change)
    assert places == ["train", "test"]
    assert (changed.train.file, changed.test.file) == ("train", "test")
    assert changed.workers == value.workers
    assert mapped({"f": value.train, "n": 1}, change, "loss") == {
        "f": value.train.lying_in("loss.f"),
        "n": 1,
    }
    assert places[-1] == "loss.f"


def test_a_value_without_changes_is_the_same_one():
    value = TorchData(train=ROWS)
    assert mapped(value, lambda own, _: own) is value
    held = {"f": value}
    assert mapped(held, lambda own, _: own) is held
    assert mapped(5, lambda own, _: own) == 5


def test_all_files_of_a_value_are_opened(lying):
    value = TorchData(train=Own(name="list", file=lying.file))
    assert opened(value).train.held == [1, 2]


class Wave(Extension):
    """An extension of a kind that nothing else has."""

    kind = "waves"


class Named(Wave):
    """One with a name of its own."""

    name = "the named one"


def test_an_extension_is_called_as_its_class_unless_it_says_otherwise():
    assert Wave.name == "Wave"
    assert Named.name == "the named one"

    class After(Named):
        pass

    assert After.name == "After"
    assert Check("parity", True, "tried").ok


def test_an_extension_is_given_as_object_or_class():
    wave = Wave()
    assert named(wave, "waves", ()).held is wave
    assert isinstance(named(Wave, "waves", ()).held, Wave)
    assert isinstance(extension_of(Own.of(Wave), "waves"), Wave)
    assert named("flat", "waves", ("flat",)) == "flat"
    assert named(None, "waves", ("flat",)) is None
    own = Own.of(wave)
    assert named(own, "waves", ()) is own
    assert named("math:sqrt", "waves", ()) == Own(name="math:sqrt")


def test_what_is_no_extension_of_the_kind_is_refused():
    with pytest.raises(OwnObjectError, match="is none of the tides"):
        named(Wave(), "tides", ())
    with pytest.raises(OwnObjectError, match="is none of the waves"):
        extension_of(Own.of(5), "waves")
    with pytest.raises(ValueError, match="there are 'flat', 'ring'"):
        named("round", "waves", ("flat", "ring"))
