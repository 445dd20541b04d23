"""What is installed, and what is a person's own, by where it lies."""

import json
import os
import sys
import sysconfig

import pytest
import torch

from workbench.client.run.own_objects import Libraries


@pytest.mark.parametrize("module", [os, json, torch, pytest], ids=lambda module: module.__name__)
def test_python_and_its_packages_are_installed(module):
    assert module.__file__ in Libraries.of_this_python()


@pytest.mark.parametrize("folder", ["lib/python3/dist-packages/a", ".venv/lib/site-packages"])
def test_so_are_packages_of_other_environments(tmp_path, folder):
    assert str(tmp_path / folder / "b.py") in Libraries.of_this_python()


@pytest.mark.parametrize("prefix", ["project/.venv", "project", "."])
def test_a_project_around_an_environment_is_a_person_s_own(tmp_path, monkeypatch, prefix):
    # As Python tells it where it runs in that environment: it remembers where it began.
    monkeypatch.setattr(sys, "prefix", str(tmp_path / prefix))
    for name in ("base", "platbase"):
        monkeypatch.setitem(sysconfig.get_config_vars(), name, str(tmp_path / prefix))
    assert sysconfig.get_path("data") == str(tmp_path / prefix)
    libraries = Libraries.of_this_python()
    assert str(tmp_path / "project" / "model.py") not in libraries
    assert str(tmp_path / "project" / "lib" / "model.py") not in libraries
    assert os.__file__ in libraries


def test_a_library_is_the_same_by_way_of_a_link(tmp_path):
    (tmp_path / "python").symlink_to(os.path.dirname(os.__file__))
    assert str(tmp_path / "python" / "os.py") in Libraries.of_this_python()
