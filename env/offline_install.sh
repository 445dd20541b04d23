#!/bin/sh
# Installs the workbench from this folder alone, which env/offline made: install [PYTHON]
# Without PYTHON it makes .venv in parallel-workbench/, for env/lab and env/test there; with it, it
# installs into that Python, such as one that has torch. Says what is missing.
# PYTHON=/path/to/python in the environment chooses the Python of a new .venv.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
root=$here/parallel-workbench
for part in parallel-workbench/env/setup.sh wheels.txt requirements.txt left-out.txt python platform; do
    [ -f "$here/$part" ] || {
        echo "error: $here/$part is missing: copy the whole folder that env/offline made" >&2
        exit 1
    }
done
. "$root/env/setup.sh"
wheels=$here/wheels
pythons=$(cat "$here/python")
gib=$(($(du -sk "$wheels" | cut -f 1) * 4 / 1024 / 1024 + 1)) # unpacked, they are some four times as large

lacking=''
while read -r wheel; do
    [ -f "$wheels/$wheel" ] || lacking="$lacking $wheel"
done <"$here/wheels.txt"
[ -z "$lacking" ] || fail "missing in $wheels:$lacking" "copy the whole folder that env/offline made"

# What was left out is that Python's own.
[ ! -s "$here/left-out.txt" ] || venv_options=--system-site-packages

if [ $# -eq 0 ]; then
    prepare
    installed=$venv/bin/python
else
    installed=$1 log=$here/install.log
    is_supported "$(version_of "$1")" || fail \
        "$1 is Python $(version_of "$1"), and the wheels are for $pythons" \
        "collect them again, with env/offline DIR --python"
    cd "$root"
    pip_install "$1" || explain $?
    rm -f "$log"
fi

# What engines and notebooks load is there, also what was left out, in a version that suits.
"$installed" - "$here/left-out.txt" <<'END' || fail "not all is there (above)" \
    "what was left out belongs into the Python that .venv is made from: PYTHON=/path/to/python" \
    "or name one that has it: $here/install /path/to/python"
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from pkgutil import iter_modules

from packaging.requirements import Requirement

wrong = []
for line in Path(sys.argv[1]).read_text().splitlines():
    needed = Requirement(line)
    try:
        there = version(needed.name)
    except PackageNotFoundError:
        print(f"missing: {line}, which env/offline left out", file=sys.stderr)
    else:
        if not needed.specifier.contains(there, prereleases=True):
            wrong.append(f"{needed.name} is {there} here, and {needed.specifier} is needed")
for name in ("train", "engine", "client", "widgets"):
    try:
        room = import_module(f"workbench.{name}")
        for module in iter_modules(room.__path__, f"{room.__name__}."):
            import_module(module.name)
    except ModuleNotFoundError as error:
        wrong.append(f"workbench.{name} cannot be loaded: {error}")
sys.exit("\n".join(wrong) or 0)
END
say "installed in $installed"
