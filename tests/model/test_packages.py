"""Names of other packages' models; the packages themselves need not be there."""

import sys
from types import SimpleNamespace

import pytest
from torch import nn

from workbench.model.errors import ModelError
from workbench.model.tracing.trace import trace


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ModelError, match=r"pip install 'parallel-workbench\[models\]'"):
        trace("timm/resnet18")


def test_an_unknown_package_is_named():
    with pytest.raises(ModelError, match="no package 'keras' of models by name; there are 'timm'"):
        trace("keras/resnet")


def test_a_package_builds_the_model_with_the_arguments(monkeypatch):
    """The package is asked for what is built; here, by an object that answers as timm does."""
    asked = {}

    def create_model(name: str, **arguments: object) -> nn.Module:
        asked.update(arguments, name=name)
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 4))

    library = SimpleNamespace(
        is_model=lambda name: name == "small",
        list_models=lambda: ["small"],
        create_model=create_model,
    )
    monkeypatch.setitem(sys.modules, "timm", library)
    graph = trace("timm/small", input_shape=(3, 2, 2), num_classes=4, drop_rate=0.1)
    assert graph.num_classes == 4
    assert asked == {"name": "small", "num_classes": 4, "drop_rate": 0.1}
    with pytest.raises(ModelError, match="no model 'smal' of timm; did you mean 'small'"):
        trace("timm/smal")
