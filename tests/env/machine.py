"""A machine to start the scripts on: a checkout, and a PATH with just what the test puts there."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = "cat cksum cp cut df dirname du flock grep head id mkdir rm sed sh sha256sum tail".split()

# Answers as Python does; its pip writes down how it was called, and obeys PIP_SAYS and PIP_EXITS.
PYTHON = """#!/bin/sh
case $* in
*version_info*) echo {version} ;;
*ensurepip*) exit {without_venv} ;;
"-m venv "*) for place do :; done; mkdir -p "$place/bin" && cp "$0" "$place/bin/python" ;;
"-m pip --version") ;;
"-m pip install "*)
    echo "$* user=${{PIP_USER:-}}" >>"$CALLS"
    while [ "$1" != --log ]; do shift; done
    echo "${{PIP_SAYS:-}}" >"$2"
    if [ -n "${{PIP_WAITS:-}}" ]; then read -r _ <"$PIP_WAITS"; fi
    exit "${{PIP_EXITS:-0}}" ;;
*) for argument do echo "<$argument>"; done
    [ -z "${{PYTHONDONTWRITEBYTECODE:-}}" ] || echo "compiles again" ;;
esac
"""


class Machine:
    """`start` runs env/lab or env/test; `calls` are the installations that pip was asked for."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "a checkout"  # people do put spaces there
        self.bin = folder / "bin"
        self.log = folder / "calls"
        for name in ("env", "notebooks", "workbench/widgets"):
            (self.checkout / name).mkdir(parents=True)
        for name in ("lab", "test", "matrix", "setup.sh", "bundle.py", "constraints.txt"):
            shutil.copy(ROOT / "env" / name, self.checkout / "env")
        for name in ("pyproject.toml", "workbench/widgets/a.js", "notebooks/00-first.ipynb"):
            (self.checkout / name).write_text(name)
        self.bin.mkdir()
        for tool in filter(shutil.which, TOOLS):
            (self.bin / tool).symlink_to(str(shutil.which(tool)))

    @property
    def venv(self) -> Path:
        return self.checkout / ".venv"

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def program(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(self, name: str, version: str, *, venv: bool = True) -> Path:
        return self.program(name, PYTHON.format(version=version, without_venv=int(not venv)))

    @contextmanager
    def open(
        self, script: str, *arguments: str, **environment: str
    ) -> Iterator[subprocess.Popen[str]]:
        """A script under way, which is killed where a test fails."""
        with subprocess.Popen(
            [self.checkout / "env" / script, *arguments],
            cwd=self.checkout.parent,
            env={"PATH": str(self.bin), "CALLS": str(self.log), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Whoever starts the tests in the background may have had it ignored.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        ) as process:
            try:
                yield process
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise

    def start(self, script: str, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Gives the exit status, what the script printed, and what it said on the way."""
        with self.open(script, *arguments, **environment) as process:
            printed, said = process.communicate(timeout=60)
        return process.returncode, printed, said
