"""Which clusters there are, by name: one small file for each in the platform's folder for state."""

import hashlib
import os
import platform
import re
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import platformdirs

from workbench.plan.io.files import OTHERS_WRITE, write_whole
from workbench.store.cluster_spec import FILE
from workbench.store.errors import ClusterError

PREFIX = ".cluster-"
_NAME = re.compile(r"\w[\w.-]*")
_OWN = re.compile(r"(.+)-(\d+)-[0-9a-f]{8}")


def new_name() -> str:
    """Returns a name that no other cluster has, for one that was given none."""
    return f"{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def owner_of(name: str) -> int | None:
    """Returns the process that started a cluster of this host without a name; None: it has one."""
    found = _OWN.fullmatch(name)
    return int(found[2]) if found is not None and found[1] == platform.node() else None


def folder_for(directory: Path, name: str) -> Path:
    """Returns the folder of a cluster beside its runs.

    Raises:
        ValueError: a folder cannot have this name.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"a cluster's name has letters, digits, '.', '_' and '-', got {name!r}")
    return directory / f"{PREFIX}{name}"


def name_of(folder: Path) -> str:
    """Returns the name of the cluster that has a folder."""
    return folder.name.removeprefix(PREFIX)


def enter(folder: Path) -> None:
    """Lets a cluster be found by its name."""
    place = _place(name_of(folder))
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, f"{folder}\n")


def remove(folder: Path) -> None:
    """Forgets the name of a cluster's folder; another cluster of this name stays."""
    place = _place(name_of(folder))
    with suppress(OSError, ValueError):  # there is none, or it cannot be read
        if place.read_text().strip() == str(folder):  # whether or not the folder is still there
            place.unlink()


def known() -> Iterator[tuple[str, Path]]:
    """Yields the names and folders of all clusters whose folders are there, by name."""
    for place in sorted(_place("").parent.glob("*.cluster")):
        if (folder := _found(place.stem)) is not None:
            yield place.stem, folder


def find(name: str | Path) -> Path:
    """Returns the folder of a cluster.

    A name is never taken for a folder: what lies in the current folder may be anybody's.

    Args:
        name: the name of the cluster; or its folder, as a `Path`, or as text with a "/" in it.

    Raises:
        ClusterError: there is no such cluster; the text says which ones there are.
    """
    if isinstance(name, Path) or os.sep in name:
        if (Path(name) / FILE).exists():
            return Path(name).resolve()
    elif (folder := _found(name)) is not None:
        return folder
    names = ", ".join(repr(name) for name, _folder in known()) or "none"
    raise ClusterError(f"there is no cluster {str(name)!r}; those that are known here: {names}")


def require_trusted(folder: Path, *, trust: bool = False) -> None:
    """Checks that what a cluster's folder has executed, its job server and tasks, is one's own.

    Args:
        trust: whether the caller vouches for a folder that was not made by a cluster of theirs.

    Raises:
        ClusterError: somebody else owns it or may write into it; or it is none of the clusters that
            this user has started, and the caller does not vouch for it.
    """
    for path in (folder, folder / FILE):
        status = path.lstat()
        if status.st_uid != os.geteuid() or status.st_mode & OTHERS_WRITE:
            raise ClusterError(
                f"{path} belongs to another user, or others may write there: they could have "
                "anything executed. Clusters are attached to by who has started them"
            )
    if not trust and _found(name_of(folder)) != folder:
        raise ClusterError(
            f"{folder} is none of the clusters that you have started from this account: what it "
            "holds would be executed here. If all of it is yours: attach(folder, trust=True)"
        )


def place_of(folder: Path) -> Path:
    """Returns a folder for what one of these clusters keeps on this host; it may not be there."""
    path = os.path.realpath(folder)
    digest = hashlib.sha256(path.encode()).hexdigest()[:16]
    return _place("").parent / f"{name_of(folder)}-{digest}"


def _place(name: str) -> Path:
    return platformdirs.user_state_path("workbench") / "clusters" / f"{name}.cluster"


def _found(name: str) -> Path | None:
    with suppress(OSError, ValueError):  # it is not there, or no text
        folder = Path(_place(name).read_text().strip())
        if (folder / FILE).exists():
            return folder
    return None
