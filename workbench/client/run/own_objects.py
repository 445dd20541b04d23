"""A user's own functions and objects, written where the ranks of a run can load them.

They are pickled: functions and classes of a notebook, and of modules in the folder that it runs
in, by value. So a rank has the text that the notebook has now, wherever it runs, and not what it
has imported an hour ago. What is installed is imported there.
"""

import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Self, TypeVar

import cloudpickle  # type: ignore[import-untyped]

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.sync import check_own
from workbench.plan.extension.sealed import seal
from workbench.plan.extension.user_object import Own, OwnObjectError, digest_of, mapped
from workbench.plan.io.errors import ExperimentError
from workbench.plan.io.files import write_whole
from workbench.plan.plans.plan import Plan
from workbench.store.cluster_spec import key_of

T = TypeVar("T", Experiment, Plan)
_OURS = __name__.partition(".")[0]


def kept(value: T, folder: Path, place: str = "") -> T:
    """An experiment or a plan with all own objects in files, each named by its content.

    Args:
        place: the value's own place, for errors.

    Raises:
        ExperimentError: an object cannot be pickled, or "module:attribute" is not there, or is not
            what it is given as.
        OSError: the disk is full, or the folder cannot be written to.
    """
    objects = folder / "objects"
    _require(value, objects, place)
    found: T = mapped(value, lambda own, place: _written(own, objects, place), place)
    if isinstance(found, Experiment):
        try:
            check_own(found.sync)
        except ValueError as error:
            raise ExperimentError(f"sync: {error}") from error
    return found


def _require(value: Experiment | Plan, folder: Path, place: str) -> None:
    """Refuses what no rank could have, all of it at once.

    Raises:
        ExperimentError: there is some; the text says how to give it.
    """
    absent: dict[str, OwnObjectError] = {}

    def look(own: Own, place: str) -> Own:
        if own.held is None and Path(own.file).parent != folder:
            try:
                _ = own.loaded
            except OwnObjectError as error:
                absent[place] = error
        return own

    mapped(value, look, place)
    if absent:
        told = "; ".join(f"{place}: {error}" for place, error in absent.items())
        fields = ", ".join(dict.fromkeys(f"{place.partition('.')[0]}=..." for place in absent))
        raise ExperimentError(f"{told}; as in experiment.replace({fields})")


def _written(own: Own, folder: Path, place: str) -> Own:
    if own.held is None or Path(own.file).parent == folder:
        return own
    try:
        with by_value():
            content: bytes = cloudpickle.dumps(own.held)
    except Exception as error:  # whatever its own methods raise
        lock = ", or an attribute for functools.cached_property, which holds a lock"
        raise ExperimentError(
            f"{place}: {own} cannot be pickled, so that no rank can have it: {error}. Give "
            f"'module:function' of what makes it there{lock if 'RLock' in str(error) else ''}"
        ) from error
    path = folder / f"{own.name.rpartition('.')[2].strip('<>')}-{digest_of(content)}.pickle"
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, seal(content, key_of(folder.parent)))
    return own.lying_in(str(path))


@contextmanager
def by_value() -> Iterator[None]:
    """Has what modules beside the notebook define pickled by value."""
    beside = _beside()
    registered = []
    try:
        for name in beside.keys() - cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(beside[name])
            registered.append(beside[name])
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def _beside() -> dict[str, ModuleType]:
    """The modules in the current folder that are not installed there, by their own names.

    `sys.modules` may have one under several names, as os.path is posixpath.
    """
    here, libraries = Path.cwd(), Libraries.of_this_python()
    found = {}
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        # Not as an attribute: some modules import others when they are asked for any.
        file, name = vars(module).get("__file__"), module.__name__
        if not isinstance(file, str) or not Path(file).is_relative_to(here) or file in libraries:
            continue
        # What is there under other names only cannot be imported, and is pickled by value anyway.
        if name in sys.modules and name.partition(".")[0] not in ("__main__", _OURS):
            found[name] = module
    return found


_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
_PACKAGES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Libraries:
    """The folders of Python and of installed packages: `module.__file__ in libraries`.

    A virtual environment in the folder of a project does not make the project part of it.

    Attributes:
        folders: their paths, each with "/" at its end.
    """

    folders: tuple[str, ...]

    @classmethod
    def of_this_python(cls) -> Self:
        """Those of this Python, of the one that it is based on, and of this user."""
        base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
        found = {site.getusersitepackages()}
        for scheme in (sysconfig.get_paths(), sysconfig.get_paths(vars=base)):
            # Not "data", the prefix itself: /usr, or a project's folder. People work in both.
            found |= {scheme[name] for name in _LIBRARIES}
        found |= set(map(os.path.realpath, found))
        return cls(tuple(os.path.join(folder, "") for folder in sorted(found)))

    def __contains__(self, file: str) -> bool:
        """Whether a file is part of Python, or of a package that is installed."""
        # A package may be installed for another Python, of which this one was given the folder.
        if any(name in Path(file).parts for name in _PACKAGES):
            return True
        return file.startswith(self.folders) or os.path.realpath(file).startswith(self.folders)
