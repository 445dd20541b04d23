"""What the site takes from elsewhere: notebooks, their pictures, and drawings of real values.

`<!-- drawn: placements -->` in a page stands for what `drawings.placements()` gives.
"""

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NOTEBOOKS = ROOT / "notebooks"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds each notebook as a page, and the pictures in `notebooks/images`."""
    for notebook in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
        text, made = MarkdownExporter().from_filename(str(notebook))
        opened = (
            f"\n\n*This page is `notebooks/{notebook.name}`: `./env/lab` opens it to be run.*\n"
        )
        text = re.sub(r"\]\((\d\d-[\w-]+)\.ipynb\)", r"](\1.md)", text)  # to each other
        text = re.sub(r"\]\(docs/pages/([\w/-]+\.md)", r"](../\1", text)  # and to other pages
        title, _, rest = text.partition("\n")
        path = f"tutorial/{notebook.stem}.md"
        files.append(File.generated(config, path, content=f"{title}{opened}{rest}"))
        for name, picture in made["outputs"].items():
            files.append(File.generated(config, f"tutorial/{name}", content=picture))
    for image in sorted((NOTEBOOKS / "images").iterdir()):
        path = f"notebooks/images/{image.name}"
        files.append(File.generated(config, path, abs_src_path=str(image)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replaces each comment that names a drawing by that drawing."""
    return re.sub(r"<!-- drawn: (\w+) -->", lambda m: _drawn(m[1]), markdown)


def _drawn(name: str) -> str:
    for folder in (ROOT, HERE):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    import drawings

    if not hasattr(drawings, name):
        raise PluginError(f"drawings.py has no {name!r}")
    drawn: str = getattr(drawings, name)()
    return drawn
