"""Models of other packages by name: "timm/vit_tiny_patch16_224", "transformers/gpt2".

They are built with random values. Nothing is downloaded, unless the package's own arguments ask for
it, as `pretrained=True` of timm does.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from workbench.model.errors import ModelError
from workbench.model.vision import torchvision
from workbench.plan.io.errors import unknown

_PACKAGES = ("timm", "transformers")
_HEADS = ("CausalLM", "MaskedLM", "ImageClassification")  # the first that a model has


@dataclass(frozen=True)
class PackagedModel:
    """A model that another package has built, and what its graph is to be told."""

    module: nn.Module
    outputs: Mapping[str, str] | None = None
    vocabulary: int | None = None


def packaged(name: str, num_classes: int, arguments: Mapping[str, Any]) -> PackagedModel:
    """Builds "package/model".

    Raises:
        ModelError: an unknown or missing package, an unknown model, or arguments that the package
            refuses.
    """
    package, _, model = name.partition("/")
    if package not in _PACKAGES:
        raise ModelError(unknown("package", package, _PACKAGES, of="models by name"))
    try:
        torchvision()  # which both import
        library = importlib.import_module(package)
    except ImportError as error:
        raise ModelError(
            f"{name}: the package {package} cannot be imported ({error}): "
            "pip install 'parallel-workbench[models]'"
        ) from error
    build = _timm if package == "timm" else _transformers
    try:
        return build(library, model, num_classes, dict(arguments))
    except ModelError:
        raise
    except Exception as error:  # whatever the package raises
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise ModelError(f"{name} cannot be built with {given}: {error}") from error


def _timm(library: Any, name: str, num_classes: int, arguments: dict[str, Any]) -> PackagedModel:
    if not library.is_model(name):
        raise ModelError(unknown("model", name, library.list_models(), of="timm"))
    return PackagedModel(library.create_model(name, num_classes=num_classes, **arguments))


def _transformers(
    library: Any, name: str, num_classes: int, arguments: dict[str, Any]
) -> PackagedModel:
    fields, head = dict(arguments.pop("config", {})), arguments.pop("head", None)
    if arguments:
        raise ModelError(
            f"transformers/{name} takes config= and head=, got {', '.join(arguments)}: "
            "fields of the configuration are given in config={...}"
        )
    known = library.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    if name not in known:
        raise ModelError(unknown("model type", name, known, of="transformers"))
    # Experts by one product of all tokens, which can be traced: other ways count tokens.
    defaults = {"use_cache": False, "experts_implementation": "batched_mm"}
    defaults["num_labels"] = num_classes
    config = library.AutoConfig.for_model(name, **(defaults | fields))
    for one in _HEADS if head is None else (head,):
        maker = getattr(library, f"AutoModelFor{one}", None)
        if maker is not None and type(config) in maker._model_mapping.keys():
            tokens = config.vocab_size if one.endswith("LM") else None
            return PackagedModel(maker.from_config(config), {"logits": "prediction"}, tokens)
    wanted = ", ".join(_HEADS) if head is None else head
    raise ModelError(f"transformers/{name} has no head {wanted}; build the module, and trace that")
