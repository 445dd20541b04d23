"""Which modules are installed, and which are a person's own.

What is installed is the same wherever this environment is, so that its name and version say what
it is. A person's own code changes from run to run: it travels with a run, and is kept with it.
"""

import os
import site
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Self

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
