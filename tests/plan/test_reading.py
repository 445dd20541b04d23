"""Files that people give, as text."""

import os

import pytest

from workbench.plan.io.errors import PlanError
from workbench.plan.io.files import MOST_BYTES, about, text_of, toml_of


def test_a_file_is_text_in_utf_8(tmp_path):
    (tmp_path / "a").write_bytes("ü\n".encode())
    assert text_of(tmp_path / "a", PlanError) == "ü\n"
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(PlanError, match="no text in UTF-8"):
        text_of(tmp_path / "a", PlanError)


def test_a_file_has_64_mib_at_most(tmp_path):
    assert MOST_BYTES == 67_108_864
    with (tmp_path / "a").open("wb") as file:
        file.truncate(MOST_BYTES)  # which takes no space
    assert len(text_of(tmp_path / "a", PlanError)) == MOST_BYTES
    os.truncate(tmp_path / "a", MOST_BYTES + 1)
    with pytest.raises(PlanError, match="of at most 64 MiB"):
        text_of(tmp_path / "a", PlanError)


def test_a_folder_is_no_file_of_text(tmp_path):
    with pytest.raises((PlanError, OSError)):
        text_of(tmp_path, PlanError)


def test_what_is_wrong_is_told_with_the_file():
    with pytest.raises(PlanError, match=r"^a/b: because$"), about("a/b", PlanError):
        raise PlanError("because")
    with pytest.raises(KeyError, match=r"^'because'$"), about("a/b", PlanError):
        raise KeyError("because")


def test_toml_is_read():
    assert toml_of("a = [1, 2]", PlanError) == {"a": [1, 2]}
    with pytest.raises(PlanError, match="not TOML: "):
        toml_of("a = ", PlanError)


def test_whole_numbers_have_64_bits():
    assert toml_of(f"a = {-(2**63)}\nb = [{{c = {2**63 - 1}}}]", PlanError) == {
        "a": -(2**63),
        "b": [{"c": 2**63 - 1}],
    }
    for number, bits in ((2**63, 64), (-(2**63) - 1, 64), (10**400, 1329)):
        with pytest.raises(PlanError, match=f"beyond 64 bits, of {bits}"):
            toml_of(f"a = [{{b = {number}}}]", PlanError)
