"""env/offline and what it leaves: real wheels, made here; pip asks no index."""

import shutil
import zipfile

import pytest
from packaging.requirements import Requirement

from env.offline import OfflineError, Target, follow, main
from tests.env.machine import ROOT, Machine

PLAIN = "py3-none-any"
ON_LINUX = "cp312-cp312-manylinux_2_17_x86_64"


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder that takes the index's place; `shelf(name, *requirements)` puts a wheel there."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    for name, value in (
        ("NO_INDEX", "1"),
        ("FIND_LINKS", str(folder)),
        ("CONFIG_FILE", "/dev/null"),
    ):
        monkeypatch.setenv(f"PIP_{name}", value)

    def put(name, *requirements, tag=PLAIN):
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
        lines += [f"Requires-Dist: {needed}" for needed in requirements]
        with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as wheel:
            about = f"{name}-1.0.dist-info"
            wheel.writestr(f"{about}/METADATA", "\n".join(lines) + "\n")
            wheel.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
            wheel.writestr(f"{about}/RECORD", "")

    return put


def followed(tmp_path, first, target, without=()):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    found, left_out = follow(list(map(Requirement, first)), target, without, wheels)
    return sorted(path.name.partition("-")[0] for path in found), list(map(str, left_out))


@pytest.mark.slow
def test_requirements_are_followed_as_the_machine_there_has_them(shelf, tmp_path):
    """What this Python and this machine would need is another matter."""
    shelf(
        "first",
        "second[more]",
        "on_arm; platform_machine == 'aarch64'",
        "on_old; python_version < '3.12'",
    )
    shelf("second", "third; extra == 'more'", "fourth; extra == 'else'")
    shelf("third", tag=ON_LINUX)
    target = Target.of("3.12", "manylinux_2_28_x86_64")
    assert followed(tmp_path, ["first>=1"], target) == (["first", "second", "third"], [])


@pytest.mark.slow
def test_what_only_a_left_out_package_needs_is_left_out_too(shelf, tmp_path):
    shelf("first", "large>=1", "second")
    shelf("second")
    assert followed(tmp_path, ["first"], Target.of(None, None), {"large"}) == (
        ["first", "second"],
        ["large>=1"],
    )


@pytest.mark.slow
def test_a_package_without_a_wheel_for_the_machine(shelf, tmp_path):
    shelf("first", tag=ON_LINUX)
    with pytest.raises(OfflineError, match=r"for Python 3.12 on manylinux_2_16_x86_64"):
        followed(tmp_path, ["first"], Target.of("3.12", "manylinux_2_16_x86_64"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--python", "3"), "--python 3: a version such as 3.12 is wanted"),
        (("--platform", "linux"), "--platform linux: manylinux_2_GLIBC_MACHINE is wanted"),
        ((), "is there, and not an empty folder: name a new one"),
    ],
)
def test_what_cannot_be_made_is_said_at_once(tmp_path, capsys, arguments, said):
    (tmp_path / "mine").touch()
    assert main([str(tmp_path), *arguments]) == 1
    assert said in capsys.readouterr().err


@pytest.fixture
def away(tmp_path):
    """A machine with a folder as env/offline leaves it: `start("../../install")`."""
    machine = Machine(tmp_path)
    machine.python("python3", "3.12")
    folder = tmp_path / "a way"
    folder.mkdir()
    machine.checkout = machine.checkout.rename(folder / "parallel-workbench")
    shutil.copy(ROOT / "env" / "offline_install.sh", folder / "install")
    (folder / "install").chmod(0o755)
    (folder / "wheels").mkdir()
    wheels = ["one-1.0-py3-none-any.whl", "two-2.0-py3-none-any.whl"]
    for wheel in wheels:
        (folder / "wheels" / wheel).touch()
    (folder / "wheels.txt").write_text("\n".join([*wheels, ""]))
    (folder / "requirements.txt").write_text("one==1.0\ntwo==2.0\n")
    (folder / "left-out.txt").touch()
    (folder / "python").write_text("3.12\n")
    (folder / "platform").write_text("manylinux_2_28_x86_64\n")
    return machine


INSTALL = "../../install"


def test_install_asks_no_index(away):
    status, _, said = away.start(INSTALL)
    assert status == 0, said
    (call,) = away.calls
    assert f"--isolated --no-index --find-links {away.checkout.parent / 'wheels'} --no-deps" in call
    assert call.split(" user=")[0].endswith("requirements.txt --editable .")
    assert away.start("test")[0] == 0
    assert len(away.calls) == 1, "env/test of that checkout installs nothing more"


def test_install_names_the_wheels_that_are_missing(away):
    (away.checkout.parent / "wheels" / "two-2.0-py3-none-any.whl").unlink()
    status, _, said = away.start(INSTALL)
    assert status == 1
    assert f"missing in {away.checkout.parent / 'wheels'}: two-2.0-py3-none-any.whl\n" in said
    assert not away.venv.exists()


def test_install_names_a_part_of_the_folder_that_is_missing(away):
    (away.checkout.parent / "left-out.txt").unlink()
    status, _, said = away.start(INSTALL)
    assert (status, "left-out.txt is missing: copy the whole folder" in said) == (1, True)


def test_install_says_which_python_the_wheels_are_for(away):
    (away.checkout.parent / "python").write_text("3.13\n")
    assert "needs one of Python 3.13; found: python3 is 3.12\n" in away.start(INSTALL)[2]


def test_install_says_what_machine_the_wheels_are_for(away):
    said = away.start(INSTALL, PIP_EXITS="1", PIP_SAYS="No matching distribution found for one")[2]
    assert "they are for Python 3.12 on manylinux_2_28_x86_64\n" in said


def test_install_takes_the_python_that_is_named(away):
    named = away.python("its own", "3.12")
    status, _, said = away.start(INSTALL, str(named))
    assert (status, f"installed in {named}\n" in said) == (0, True)
    assert len(away.calls) == 1
    assert not away.venv.exists()


def test_install_does_not_take_a_python_of_another_version(away):
    named = away.python("its own", "3.11")
    status, _, said = away.start(INSTALL, str(named))
    assert (status, f"{named} is Python 3.11, and the wheels are for 3.12\n" in said) == (1, True)


def test_what_was_left_out_may_be_that_python_s_own(away, tmp_path):
    (away.checkout.parent / "left-out.txt").write_text("torch<2.14,>=2.11\n")
    python = (away.bin / "python3").read_text()
    seen = tmp_path / "seen"
    away.program("python3", python.replace("case $* in", f'echo "$*" >>{seen}\ncase $* in'))
    assert away.start(INSTALL)[0] == 0
    assert f"-m venv --system-site-packages {away.venv}" in seen.read_text().splitlines()
