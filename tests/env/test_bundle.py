"""env/bundle.py with stand-ins for node and npm, and what it really made."""

import os
import re

import pytest

from env.bundle import WIDGETS, BundleError, bundle, is_fresh

NPM = """#!/bin/sh
echo ci >>calls
mkdir -p node_modules/chart
echo '{"name": "chart", "version": "1.2.3"}' >node_modules/chart/package.json
echo 'Copyright Somebody' >node_modules/chart/LICENSE
"""
NODE = """#!/bin/sh
[ "$1" != --version ] || { echo v20.1.0; exit; }
for argument do case $argument in
    --outdir=*) out=${argument#*=} ;;
    --metafile=*) meta=${argument#*=} ;;
esac; done
echo "$*" | grep -o '[a-z]*[.]js$' >entries
echo bundled >"$out/view.js"
printf '{"outputs": {"%s": {"inputs": {"view.js": {}, "%s": {}}}}}' \\
    "$out/view.js" "node_modules/chart/dist/chart.js" >"$meta"
"""


@pytest.fixture
def widgets(tmp_path, monkeypatch):
    folder = tmp_path / "widgets"
    folder.mkdir()
    for name in (".npmrc", "package.json", "package-lock.json"):
        (folder / name).write_text(name)
    (folder / "part.js").write_text("export function part() {}\n")
    (folder / "view.js").write_text('import "chart";\nexport default () => {}\n')
    program(tmp_path, "npm", NPM)
    program(tmp_path, "node", NODE)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.defpath}")
    return folder


def program(folder, name, text):
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def test_scripts_with_a_default_export_are_bundled_with_their_licences(widgets):
    assert bundle(widgets)
    assert (widgets / "entries").read_text() == "view.js\n"
    made = (widgets / "bundle" / "view.js").read_text()
    assert made == "/*! chart 1.2.3\n\nCopyright Somebody\n*/\nbundled\n"
    assert not list(widgets.glob(".bundle-*"))


def test_scripts_in_folders_are_bundled_too(widgets):
    (widgets / "zone").mkdir()
    (widgets / "zone" / "other.js").write_text("export default () => {}\n")
    assert bundle(widgets)
    assert (widgets / "entries").read_text() == "other.js\n"
    assert is_fresh(widgets)
    (widgets / "zone" / "style.css").write_text("b {}\n")
    assert not is_fresh(widgets)


def test_nothing_is_done_twice(widgets):
    bundle(widgets)
    (widgets / "bundle" / "view.js").write_text("as it was")
    assert not bundle(widgets)
    assert (widgets / "bundle" / "view.js").read_text() == "as it was"


@pytest.mark.parametrize("name", ["view.js", "new.css", "package.json", "package-lock.json"])
def test_a_changed_input_is_noticed(widgets, name):
    bundle(widgets)
    with (widgets / name).open("a") as file:
        file.write(" ")
    assert not is_fresh(widgets)
    assert bundle(widgets)


def test_packages_are_fetched_again_only_for_another_lock(widgets):
    for name in ("view.js", "view.js", "package-lock.json"):
        with (widgets / name).open("a") as file:
            file.write(" ")
        bundle(widgets)
    assert (widgets / "calls").read_text() == "ci\nci\n"


def test_without_a_network(widgets, tmp_path):
    program(tmp_path, "npm", "#!/bin/sh\necho npm error code ENOTFOUND >&2\nexit 1\n")
    with pytest.raises(BundleError, match=r"(?s)ENOTFOUND.*npm config set registry"):
        bundle(widgets)
    assert not (widgets / "bundle").exists()


def test_an_error_in_a_script_leaves_the_bundle_as_it_was(widgets, tmp_path):
    bundle(widgets)
    broken = NODE.replace("echo bundled", "echo 'view.js:2: unexpected }' >&2; exit 1 #")
    program(tmp_path, "node", broken)
    (widgets / "view.js").write_text("export default }\n")
    with pytest.raises(BundleError, match="unexpected }"):
        bundle(widgets)
    assert "bundled" in (widgets / "bundle" / "view.js").read_text()
    assert not is_fresh(widgets)


def test_a_package_without_a_licence_is_refused(widgets, tmp_path):
    program(tmp_path, "npm", NPM.replace("LICENSE", "README"))
    with pytest.raises(BundleError, match="chart holds no licence"):
        bundle(widgets)


def test_no_script_to_bundle(widgets):
    (widgets / "view.js").unlink()
    with pytest.raises(BundleError, match=r"no script in .* has a default export"):
        bundle(widgets)


@pytest.mark.parametrize("version", ["echo v16.20.0", "exit 127"])
def test_no_node_that_suits(widgets, tmp_path, monkeypatch, version):
    program(tmp_path, "node", f"#!/bin/sh\n{version}\n")
    monkeypatch.setattr("env.bundle.node_from_pypi", lambda: None)
    with pytest.raises(BundleError, match=r"needs Node\.js 18 or later"):
        bundle(widgets)


def test_what_was_really_made_is_whole():
    if not (WIDGETS / "bundle").exists():
        pytest.fail("the widgets' scripts are not bundled: run `python env/bundle.py`")
    for path in (WIDGETS / "bundle").glob("*.js"):
        text = path.read_text("utf-8")
        if "uplot" in text:
            assert "Permission is hereby granted" in text, "uPlot's licence goes with its code"
        assert not re.search(r"""\b(from|import)\s*\(?\s*["']""", text), "imports what is elsewhere"


def test_the_lock_names_no_registry():
    assert '"resolved"' not in (WIDGETS / "package-lock.json").read_text()
