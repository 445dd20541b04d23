"""A pickle as data: nothing that it names is looked up, called or changed."""

import copyreg
import os
import pickle
import time
from collections import OrderedDict
from pathlib import PurePosixPath

import pytest
import torch

from workbench.model.weights import pickled
from workbench.model.weights.pickled import Name, Record, records

HERE = f"c{__name__}\n"


class Target:
    """A live class; `function` is a live function."""


def function() -> None:
    pass


class Calls:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_plain_values_are_those_that_pickle_gives():
    value = {
        "a": [1, -1, 2**40, 1.5, "text", None],
        "b": (True, False, (), (1,), (1, 2), (1, 2, 3)),
    }
    for protocol in (2, 3, 4, 5):
        assert records(pickle.dumps(value, protocol)) == value


def test_what_would_be_called_is_a_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = records(pickle.dumps(Calls()))
    assert (type(found), found.name, found.arguments) == (
        Record,
        f"{os.mkdir.__module__}.mkdir",
        ("executed",),
    )
    assert not (tmp_path / "executed").exists()


def test_a_name_is_a_name_whatever_it_names():
    assert records(b"cos\nsystem\n.") == Name("os.system")
    assert records(b"cno.such\nthing\n.") == Name("no.such.thing")


def test_the_state_of_an_object_is_that_of_its_record():
    found = records(pickle.dumps(Target()))
    assert found.name == f"{__name__}.Target"
    found = records(pickle.dumps(PurePosixPath("a/b")))
    assert "a" in found.arguments
    assert records(pickle.dumps(torch.Size([2, 3]))).arguments == ((2, 3),)
    assert records(pickle.dumps(OrderedDict())).arguments == ()


ONE = "}X\x01\x00\x00\x00xK\x01s"


@pytest.mark.parametrize(
    ("name", "state"), [("function", ONE), ("function", f"N{ONE}\x86"), ("Target", f"N{ONE}\x86")]
)
def test_nothing_is_set_in_a_class_or_a_function(name, state):
    content = f"{HERE}{name}\n{state}b.".encode("latin1")
    with pytest.raises(ValueError, match="a Name in the place of a Record"):
        records(content)
    pickle.loads(content)  # as torch did: the fault is a real one
    assert globals()[name].x == 1
    del globals()[name].x


def test_extension_codes_are_refused(monkeypatch):
    monkeypatch.setattr(copyreg, "_extension_cache", {7: Target})
    with pytest.raises(ValueError, match="the operation EXT1"):
        records(b"\x82\x07.")


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (pickle.dumps({1, 2}), "EMPTY_SET"),
        (b"ios\nsystem\n.", "INST"),
        (b"(cos\nsystem\nX\x02\x00\x00\x00ido.", "OBJ"),
        (b"P7\n.", "PERSID"),
        (pickle.dumps(bytearray(3), 5), "BYTEARRAY8"),
    ],
)
def test_operations_that_no_checkpoint_has_are_refused(content, name):
    with pytest.raises(ValueError, match=f"the operation {name}"):
        records(content)


def test_a_far_place_of_the_memo_takes_no_memory():
    assert records(b"K\x05r\xff\xff\xff\xff.") == 5  # pickle's own makes room for all before it


def test_a_tuple_that_takes_ages_to_hash_is_no_key():
    doubled = b")\x94" + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(60))
    began = time.monotonic()
    with pytest.raises(ValueError, match="a tuple for a key"):
        records(doubled + b"}h\x3cK\x01s.")
    assert time.monotonic() - began < 5


def test_what_is_nested_a_million_times_is_read():
    assert type(records(b"]" * 10**6 + b"a" * (10**6 - 1) + b".")) is list


def test_too_many_operations(monkeypatch):
    monkeypatch.setattr(pickled, "MOST_OPERATIONS", 100)
    with pytest.raises(ValueError, match="more than 100 operations"):
        records(b"}" * 200 + b".")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b".",
        b"h\x01.",
        b"K",
        b"a.",
        b"K\x01a.",
        b"t.",
        b"u.",
        b"}(K\x01u.",
        b"NR.",
        b"K\x01K\x02.",
    ],
)
def test_what_is_damaged(content):
    with pytest.raises((ValueError, LookupError)):
        records(content)
