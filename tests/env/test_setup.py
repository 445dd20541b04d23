"""env/lab and env/test on small imagined machines: nothing is really installed here."""

import os
import shutil
import signal

import pytest

from tests.env.machine import Machine

SIDE_BY_SIDE = "<-m>\n<pytest>\n<-n>\n<auto>\n<--dist>\n<loadfile>\n<--no-loadscope-reorder>\n"


@pytest.fixture
def bare(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def machine(bare):
    bare.python("python3", "3.12")
    return bare


def works(machine, **environment):
    status, printed, said = machine.start("test", **environment)
    assert (status, printed) == (0, SIDE_BY_SIDE), said
    return said


def fails(machine, **environment):
    status, printed, said = machine.start("test", **environment)
    assert (status, printed) == (1, ""), said
    return said


def test_first_start_installs_what_is_pinned(machine):
    said = works(machine, PIP_USER="1")  # a setting that does not suit a virtual environment
    assert "making .venv with python3 (Python 3.12)" in said
    (call,) = machine.calls
    assert "--constraint env/constraints.txt --editable .[test] user=0" in call


def test_second_start_installs_nothing(machine):
    works(machine)
    assert works(machine) == ""
    assert len(machine.calls) == 1


def test_the_package_is_compiled_once(machine):
    """Not by each process of each cluster, where a container says so for what runs once."""
    works(machine, PYTHONDONTWRITEBYTECODE="1")


def test_options_are_handed_on(machine):
    _, printed, _ = machine.start("test", "-k", "not slow", "")
    assert printed == f"{SIDE_BY_SIDE}<-k>\n<not slow>\n<>\n"


@pytest.mark.parametrize(("user", "flag"), [("0", "<--allow-root>\n"), ("1000", "")])
def test_lab_opens_the_first_notebook(machine, user, flag):
    machine.program("id", f"#!/bin/sh\necho {user}\n")
    _, printed, _ = machine.start("lab", "--no-browser")
    root = f"<--ServerApp.root_dir={machine.checkout}>"
    first = "<--LabApp.default_url=/lab/tree/notebooks/00-first.ipynb>"
    assert printed == f"<-m>\n<jupyterlab>\n{root}\n{first}\n{flag}<--no-browser>\n"


@pytest.mark.parametrize(
    "name",
    [
        "pyproject.toml",
        "env/constraints.txt",
        "workbench/widgets/a.js",
        "workbench/widgets/zone/b.css",
    ],
)
def test_a_changed_input_is_installed_into_the_same_venv(machine, name):
    works(machine)
    (machine.venv / "kept").touch()
    (machine.checkout / name).parent.mkdir(exist_ok=True)
    with (machine.checkout / name).open("a") as file:
        file.write("# changed")
    assert "what it should hold has changed" in works(machine)
    assert len(machine.calls) == 2
    assert (machine.venv / "kept").exists()
    assert works(machine) == ""


def test_other_files_change_nothing(machine):
    works(machine)
    (machine.checkout / "workbench" / "new.py").touch()
    (machine.checkout / "workbench" / "widgets" / "bundle").mkdir()
    (machine.checkout / "workbench" / "widgets" / "bundle" / "made.js").touch()
    assert works(machine) == ""


def test_a_moved_checkout_is_installed_again(machine):
    """The programs in a venv name its folder, and an editable install names the checkout's."""
    works(machine)
    (machine.venv / "kept").touch()
    machine.checkout = machine.checkout.rename(machine.checkout.with_name("elsewhere"))
    assert "beginning anew" in works(machine)
    assert not (machine.venv / "kept").exists()


def test_a_venv_whose_python_is_gone_is_made_anew(machine):
    works(machine)
    (machine.venv / "bin" / "python").unlink()
    assert "beginning anew" in works(machine)


@pytest.mark.parametrize(("version", "kept"), [("3.11", True), ("3.10", False)])
def test_a_venv_made_by_hand_serves_if_its_python_suits(machine, version, kept):
    by_hand = machine.python("by-hand", version)
    (machine.venv / "bin").mkdir(parents=True)
    shutil.move(by_hand, machine.venv / "bin" / "python")
    (machine.venv / "kept").touch()
    works(machine)
    assert (machine.venv / "kept").exists() is kept


def test_after_a_failure_the_next_start_begins_anew(machine):
    fails(machine, PIP_EXITS="1")
    (machine.venv / "half-installed").touch()
    assert "beginning anew" in works(machine)
    assert not (machine.venv / "half-installed").exists()


def test_an_interrupt_leaves_no_half_stamped_venv(machine, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with machine.open("test", PIP_WAITS=str(gate)) as process, gate.open("w"):  # once pip works
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode != 0
    assert "beginning anew" in works(machine)


@pytest.mark.skipif(not shutil.which("flock"), reason="no flock here, so no turns")
def test_two_first_starts_take_turns(machine, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with machine.open("test", PIP_WAITS=str(gate)) as first, gate.open("w") as opened:
        with machine.open("lab") as second:
            assert second.stderr.readline() == "another start is installing; waiting for it\n"
            opened.write("go on\n")
            opened.flush()
            assert "jupyterlab" in second.communicate(timeout=60)[0]
        assert "pytest" in first.communicate(timeout=60)[0]
    assert len(machine.calls) == 1


@pytest.mark.parametrize("version", ["2.7", "3.10", "3.15"])
def test_a_python_that_does_not_suit(bare, version):
    bare.python("python3", version)
    said = fails(bare)
    assert f"needs one of Python 3.11 3.12 3.13 3.14; found: python3 is {version}\n" in said
    assert "PYTHON=/path/to/python" in said
    assert not bare.venv.exists()


def test_no_python_at_all(bare):
    assert "found: none" in fails(bare)


def test_a_later_python_is_found_beside_an_old_one(bare):
    bare.python("python3", "3.9")
    bare.program("python3.13", "#!/bin/sh\nexit 127\n")  # a version manager's stand-in
    bare.python("python3.11", "3.11")
    assert "with python3.11 (Python 3.11)" in works(bare)


def test_the_user_s_python_comes_first(machine):
    chosen = machine.python("my python", "3.13")
    assert f"with {chosen} (Python 3.13)" in works(machine, PYTHON=str(chosen))


def test_the_user_s_python_is_not_replaced_by_another(machine):
    chosen = machine.python("old", "3.8")
    assert "old is 3.8" in fails(machine, PYTHON=str(chosen))


def test_the_user_s_python_does_not_run(machine):
    assert "found: nowhere/python, which does not run\n" in fails(machine, PYTHON="nowhere/python")


def test_no_venv_module(bare):
    bare.python("python3", "3.11", venv=False)
    said = fails(bare)
    assert "not its modules venv and ensurepip" in said
    assert "apt-get install python3.11-venv" in said


def test_another_python_with_venv_serves(bare):
    bare.python("python3", "3.13", venv=False)
    bare.python("python3.12", "3.12")
    assert "with python3.12" in works(bare)


@pytest.mark.parametrize(
    ("gpu", "free_gib", "enough"), [(False, 2, False), (False, 4, True), (True, 4, False)]
)
def test_disk(machine, gpu, free_gib, enough):
    free = free_gib * 1024**2
    machine.program("df", f"#!/bin/sh\necho header\necho /dev/disk 100 0 {free} 0% /\n")
    if gpu:
        machine.program("nvidia-smi", "")
    if enough:
        works(machine)
    else:
        assert f"and {free // 1024} MiB are free" in fails(machine)
        assert not machine.venv.exists()


def test_a_df_that_cannot_tell_is_no_obstacle(machine):
    machine.program("df", "#!/bin/sh\necho df: cannot say >&2\nexit 1\n")
    works(machine)


@pytest.mark.parametrize(
    ("pip_says", "explained"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("ssl.SSLError: CERTIFICATE_VERIFY_FAILED", "pip config set global.cert"),
        ("NewConnectionError(...)", "pip cannot reach its package index"),
        (
            "2026-01-02T03:04:05,006 begun\n"
            "2026-01-02T03:04:05,006   npm could not get the widgets' packages:\n"
            "2026-01-02T03:04:05,006     why\n"
            "2026-01-02T03:04:05,007   ERROR: pip's own words",
            "be bundled\n  npm could not get the widgets' packages:\nwhy\n  pip's whole log",
        ),
        ("surprise", "pip failed, with the words above"),
    ],
)
def test_pip_s_failures_are_explained(machine, pip_says, explained):
    said = fails(machine, PIP_EXITS="1", PIP_SAYS=pip_says)
    assert explained in said
    assert f"pip's whole log: {machine.venv / 'install.log'}" in said


def test_killed_for_memory(machine):
    assert "memory ran out" in fails(machine, PIP_EXITS="137")


def test_other_versions_have_environments_of_their_own(machine):
    machine.python("python3.12", "3.12")
    machine.python("python3.13", "3.13")
    pins = machine.checkout / "env" / "constraints.txt"
    pins.write_text("numpy==2.4.6\ntorch==2.13.0\ntorchvision==0.28.0\n")
    status, printed, said = machine.start("matrix", "3.12:2.11", "3.13:2.12", "--", "tests/plan")
    assert (status, "Python 3.13, torch 2.12" in said) == (0, True), said
    assert printed.splitlines()[2:] == [
        "| 3.12 | 2.11 | <tests/plan> |",
        "| 3.13 | 2.12 | <tests/plan> |",
    ]
    into = machine.checkout / "build" / "matrix"
    for name, torch, vision in (("3.12-torch2.11", 11, 26), ("3.13-torch2.12", 12, 27)):
        folder = into / f"python{name}"
        pinned = (folder / "constraints.txt").read_text().splitlines()
        assert pinned == ["numpy==2.4.6", f"torch==2.{torch}.*", f"torchvision==0.{vision}.*"]
        assert any(f"--constraint {folder}/constraints.txt" in call for call in machine.calls)


def test_a_python_that_is_not_there_is_named(machine):
    status, _, said = machine.start("matrix", "3.13:2.12")
    assert (status, "there is no Python 3.13 on PATH" in said) == (1, True)


def test_what_is_no_pair_of_versions_is_refused(machine):
    status, _, said = machine.start("matrix", "tests/plan")
    assert (status, "PYTHON:TORCH is wanted" in said) == (1, True)
