import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from workbench.model import vision


def test_gives_torchvision():
    assert callable(vision.torchvision().models.vgg11)


def test_twice_gives_the_same_module():
    assert vision.torchvision() is vision.torchvision()


@pytest.mark.slow
def test_declares_schemas_where_the_operators_do_not_load(tmp_path):
    """In a fresh process, with a library that cannot be loaded."""
    (tmp_path / "_C.so").write_bytes(b"not a library")
    code = (
        "from types import SimpleNamespace\n"
        "import importlib.util, torch\n"
        "from workbench.model import vision\n"
        f"found = SimpleNamespace(origin={str(tmp_path / '__init__.py')!r})\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: found if name == 'torchvision' else real(name)\n"
        "assert not vision._compiled_operators_load()\n"
        "vision.declare_operators()\n"
        "print(torch.ops.torchvision.nms.default._schema)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Tensor dets, Tensor scores, float iou_threshold" in done.stdout


def test_declares_nothing_where_they_load(tmp_path, monkeypatch):
    library = tmp_path / "_C.so"
    library.touch()
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    origin = str(tmp_path / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=origin))
    assert vision._compiled_operators_load()
    assert loaded == [library]


@pytest.mark.parametrize("name", ["resnet18", "vgg11_bn"])
def test_models_run(name):
    model = vision.torchvision().models.get_model(name, num_classes=3).eval()
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3)


@pytest.mark.slow
def test_anybody_may_import_it_once_the_workbench_is_there():
    code = (
        "import sys, workbench\n"
        "assert 'torch' not in sys.modules\n"
        "from torchvision import transforms\n"
        "from torchvision.ops import StochasticDepth\n"
        "print(len(transforms.__dict__) > 0, StochasticDepth)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
