"""What people read as text: lines that an editor shows whole, and a text for every picture."""

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 160  # characters of a line, tables and code included
PAGES = [*ROOT.glob("*.md"), *(ROOT / "notebooks/docs/pages").rglob("*.md")]
NOTEBOOKS = (ROOT / "notebooks").glob("*.ipynb")
EVERY = sorted([*PAGES, *NOTEBOOKS])


def lines_of(path: Path) -> Iterator[tuple[str, str]]:
    """(where, line) of all Markdown in a file."""
    if path.suffix == ".md":
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            yield f"line {number}", line
        return
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            for line in cell.source.splitlines():
                yield f"cell {cell.id!r}", line


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_line_of_markdown_is_too_long() -> None:
    found = [
        f"{name(path)}, {where}: {len(line)}"
        for path in EVERY
        for where, line in lines_of(path)
        if len(line) > LONGEST
    ]
    assert not found, f"lines of more than {LONGEST} characters: {found}"


def test_every_picture_has_a_text() -> None:
    for path in EVERY:
        text = "\n".join(line for _, line in lines_of(path))
        without = re.findall(r"!\[\s*\]\([^)]*\)", text)
        without += [
            tag for tag in re.findall(r"<img\b[^>]*>", text) if not re.search(r'\balt="\w', tag)
        ]
        assert not without, f"{name(path)} has pictures without an alternative text: {without}"
