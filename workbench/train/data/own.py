"""A user's own functions and objects, as a rank loads them."""

import importlib
import pickle
from pathlib import Path
from typing import Any

from workbench.plan.experiment.own import Own, digest_of
from workbench.train.data.errors import OwnObjectError


def load(own: Own) -> Any:
    """The object itself.

    Raises:
        OwnObjectError: it cannot be imported, or its file not be read, on this engine.
    """
    if own.held is not None:
        return own.held
    try:
        if own.file:
            content = Path(own.file).read_bytes()
            if not Path(own.file).stem.endswith(digest_of(content)):
                raise OwnObjectError(f"{own.file} is not as it was written")
            return pickle.loads(content)
        module, _, attribute = own.name.partition(":")
        found = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
        return found
    except OwnObjectError:
        raise
    except Exception as error:  # whatever its own code raises
        raise OwnObjectError(
            f"{own.name!r} cannot be loaded on this engine: {type(error).__name__}: {error}"
        ) from error
