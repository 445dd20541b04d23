"""A user's own functions and objects, written where the ranks of a run can load them.

They are pickled: functions and classes of a notebook, and of modules in the folder that it runs
in, by value. So a rank has the text that the notebook has now, wherever it runs, and not what it
has imported an hour ago. What is installed is imported there.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from workbench.plan.errors import ExperimentError
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.own import Own, digest_of
from workbench.plan.value import Value
from workbench.store.files import write_whole


def kept(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment with all own objects in files, each named by its content.

    Args:
        experiment: what is to run.
        folder: the cluster's folder.

    Raises:
        ExperimentError: an object cannot be pickled, or "module:attribute" is not there.
        OSError: the disk is full, or the folder cannot be written to.
    """
    changed = {
        name: value
        for name in ("data", "loss", "metrics")
        if (value := _kept(getattr(experiment, name), folder / "objects", name))
        is not getattr(experiment, name)
    }
    return experiment.replace(**changed) if changed else experiment


def _kept(value: Any, folder: Path, place: str) -> Any:
    """The same value where nothing of it has to be written."""
    if isinstance(value, Own):
        return _written(value, folder, place)
    if isinstance(value, Mapping):
        new = {name: _kept(one, folder, f"{place}.{name}") for name, one in value.items()}
        return value if all(new[name] is value[name] for name in value) else new
    if not isinstance(value, Value):
        return value
    own = {name: getattr(value, name) for name in type(value).model_fields}
    new = {name: _kept(one, folder, f"{place}.{name}") for name, one in own.items()}
    changed = {name: one for name, one in new.items() if one is not own[name]}
    return value.replace(**changed) if changed else value


def _written(own: Own, folder: Path, place: str) -> Own:
    if own.file and Path(own.file).parent == folder:
        return own
    if own.file and own.held is None:
        raise ExperimentError(
            f"{place}: {own} lies in {own.file}, which is no file of this cluster: what is loaded "
            "from it could do anything; give the object again"
        )
    if own.held is None:
        _look(own, place)
        return own
    try:
        with _by_value():
            content: bytes = cloudpickle.dumps(own.held)
    except Exception as error:  # whatever its own methods raise
        raise ExperimentError(
            f"{place}: {own} cannot be pickled, so that no rank can have it: {error}. Give "
            "'module:function' of what makes it there"
        ) from error
    path = folder / f"{own.name.rpartition('.')[2].strip('<>')}-{digest_of(content)}.pickle"
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, content)
    return own.lying_in(str(path))


def _look(own: Own, place: str) -> None:
    """Raises unless an own object that is given by its name alone can be imported."""
    if not own.is_imported:
        raise ExperimentError(
            f"{place}: {own} was an object of the process that made this experiment, and is not in "
            "its text: give the object again, or 'module:attribute'"
        )
    module, _, attribute = own.name.partition(":")
    try:
        found = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise ExperimentError(f"{place}: {own.name!r} cannot be imported: {error}") from error


@contextmanager
def _by_value() -> Iterator[None]:
    """Has what modules beside the notebook define pickled by value."""
    registered = cloudpickle.list_registry_pickle_by_value()
    own = [module for module in list(sys.modules.values()) if _is_beside(module)]
    own = [module for module in own if module.__name__ not in registered]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _is_beside(module: ModuleType) -> bool:
    """Whether a module lies in the current folder, and is no part of what is installed there."""
    file, name = getattr(module, "__file__", None), getattr(module, "__name__", "")
    if not file or name == "__main__" or name.partition(".")[0] == __name__.partition(".")[0]:
        return False
    path, here = Path(file), Path.cwd()
    return path.is_relative_to(here) and not path.is_relative_to(Path(sys.prefix))
