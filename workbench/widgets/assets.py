"""The browser's half of the widgets, as text."""

from functools import cache
from pathlib import Path

BUNDLE = Path(__file__).parent / "bundle"


@cache
def asset(name: str) -> str:
    """A bundled file ("dashboard.js", "dashboard.css").

    Raises:
        FileNotFoundError: it has not been built; published wheels hold it.
    """
    path = BUNDLE / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not built yet: run `python env/bundle.py` once")
    return path.read_text(encoding="utf-8")
