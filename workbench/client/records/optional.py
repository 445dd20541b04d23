"""Packages that not everybody needs: asked for before they are used, with what to install."""

from importlib.util import find_spec


def require(package: str, extra: str, what: str) -> None:
    """Checks that a package is there.

    Raises:
        ModuleNotFoundError: it is not installed; the text says what to install.
    """
    if find_spec(package) is None:
        raise ModuleNotFoundError(
            f"{what} needs {package}, which is not installed: "
            f"pip install 'parallel-workbench[{extra}]', or pip install {package}",
            name=package,
        )
