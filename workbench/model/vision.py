"""Imports torchvision where its compiled operators cannot be loaded.

torchvision's wheel contains compiled operators for one build of torch. With another build (a CPU
torch from one index, torchvision from another) they do not load, and `import torchvision` itself
fails, since it gives shape rules to operators that are not declared. No classification model needs
them: with their names declared, everything else works. `workbench` has that done before anybody
imports torchvision, in a cell as well.
"""

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def torchvision() -> ModuleType:
    """The module `torchvision`, imported at the first call."""
    return importlib.import_module("torchvision")


def declare_operators() -> None:
    """Declares the operators' names where they do not load; `workbench` has it done in time."""
    if not _compiled_operators_load():
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", _SCHEMA)


def _compiled_operators_load() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True  # the import will name the missing package
    for library in sorted(Path(spec.origin).parent.glob("_C*")):
        try:
            torch.ops.load_library(library)
        except OSError:
            continue
        return True
    return False
