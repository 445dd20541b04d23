"""Collects what a machine without a network needs: `env/offline DIR`, then `DIR/install` there.

    DIR/install               makes .venv in parallel-workbench/ from this folder alone
    DIR/parallel-workbench/   the checkout, its widgets bundled, with tests and notebooks
    DIR/wheels/               the pinned packages, for one Python and one platform
    DIR/requirements.txt      what `install` installs, for pip
    DIR/wheels.txt            the wheels that have to be there
    DIR/left-out.txt          what the machine has to have itself
    DIR/python, DIR/platform  for what the wheels are

Every package is pinned, so that nothing has to be resolved: the requirements of the checkout are
followed through the wheels' own metadata, with the markers of the machine that they are for. What
is left out is not followed.
"""

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from tempfile import TemporaryDirectory

from hatchling.build import get_requires_for_build_editable
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
TESTS = "test"  # the extra that env/lab and env/test install
MANYLINUX = re.compile(r"manylinux_2_(\d+)_(\w+)")
OLDEST_GLIBC = 5  # that a tag of wheels names
OLD_NAMES = {"2014": 17, "2010": 12, "1": 5}  # manylinuxNAME: its glibc
MIB = 2**20


class OfflineError(RuntimeError):
    """The folder cannot be made; says why."""


@dataclass(frozen=True)
class Target:
    """The machine that the wheels are for.

    Attributes:
        python: its Python, such as "3.12".
        glibc: 28: Linux with glibc 2.28 or later; None: it is like this machine.
        machine: "x86_64"; not looked at where it is like this machine.
    """

    python: str
    glibc: int | None = None
    machine: str = ""

    @classmethod
    def of(cls, python: str | None, platform: str | None) -> "Target":
        """As the command line says it: "3.12", "manylinux_2_28_x86_64"; None: as here."""
        python = python or "{}.{}".format(*sys.version_info[:2])
        if not re.fullmatch(r"3\.\d+", python):
            raise OfflineError(f"--python {python}: a version such as 3.12 is wanted")
        if platform is None:
            return cls(python)
        match = MANYLINUX.fullmatch(platform)
        if match is None:
            raise OfflineError(
                f"--platform {platform}: manylinux_2_GLIBC_MACHINE is wanted, such as "
                "manylinux_2_28_x86_64; `ldd --version` tells the glibc of a machine"
            )
        return cls(python, int(match[1]), match[2])

    @property
    def platform(self) -> str:
        """Its name, also where it is like this machine."""
        if self.glibc is None:
            return sysconfig.get_platform()
        return f"manylinux_2_{self.glibc}_{self.machine}"

    @property
    def release(self) -> str:
        """A late one: some packages do without the first releases of a Python."""
        return f"{self.python}.99"

    @property
    def markers(self) -> dict[str, str]:
        """The environment that the markers of requirements are evaluated in."""
        there = {name: str(value) for name, value in default_environment().items()}
        there |= {"python_version": self.python, "python_full_version": self.release}
        if self.glibc is not None:
            there |= {"os_name": "posix", "sys_platform": "linux", "platform_system": "Linux"}
            there["platform_machine"] = self.machine
        return there

    @property
    def for_pip(self) -> list[str]:
        """The options of `pip download`. A wheel for an older glibc suits as well."""
        options = ["--python-version", self.release, "--implementation", "cp"]
        if self.glibc is None:
            return options
        tags = [f"manylinux_2_{minor}" for minor in range(self.glibc, OLDEST_GLIBC - 1, -1)]
        tags += [f"manylinux{name}" for name, glibc in OLD_NAMES.items() if glibc <= self.glibc]
        for tag in (*tags, "linux"):
            options += ["--platform", f"{tag}_{self.machine}"]
        return options


def main(arguments: list[str] | None = None) -> int:
    """Makes the folder, and says what is in it."""
    parser = argparse.ArgumentParser(
        prog="env/offline",
        description="Collects what a machine without a network needs. Copy DIR there as a whole, "
        "and start DIR/install.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="NAME",
        help="leave out a package that the machine has, such as torch, and what only it needs; "
        f"`{TESTS}`: what only the tests need. As often as wanted",
    )
    parser.add_argument("--python", metavar="3.12", help="for this Python; else for this one")
    parser.add_argument(
        "--platform",
        metavar="manylinux_2_28_x86_64",
        help="for Linux with this glibc or a later one; else for this machine's platform",
    )
    options = parser.parse_args(arguments)
    try:
        target = Target.of(options.python, options.platform)
        made = collect(options.folder, target, frozenset(map(canonicalize_name, options.without)))
    except OfflineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(made)
    return 0


def collect(folder: Path, target: Target, without: Collection[str]) -> str:
    """Fills the folder, and returns what is in it, in words.

    Raises:
        OfflineError: a name in `without` is not needed at all, a package has no wheel for the
            machine, or the folder holds something.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise OfflineError(f"{folder} is there, and not an empty folder: name a new one")
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    _copy_checkout(folder / "parallel-workbench")
    needed = _requirements(() if TESTS in without else (TESTS,))
    found, left_out = follow(needed, target, without, wheels)
    for unknown in set(without) - {TESTS} - {canonicalize_name(r.name) for r in left_out}:
        raise OfflineError(f"--without {unknown}: nothing that is collected needs it")
    pins = sorted("{}=={}".format(*parse_wheel_filename(wheel.name)[:2]) for wheel in found)
    for name, lines in (
        ("requirements.txt", pins),
        ("wheels.txt", sorted(wheel.name for wheel in found)),
        ("left-out.txt", sorted(map(_plain, left_out))),
        ("python", [target.python]),
        ("platform", [target.platform]),
    ):
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    shutil.copy(ROOT / "env" / "offline_install.sh", folder / "install")
    (folder / "install").chmod(0o755)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    lacks = f", without {', '.join(sorted(r.name for r in left_out))}" if left_out else ""
    return (
        f"{folder}: {len(found)} wheels, {size / MIB:,.0f} MiB, for Python {target.python} on "
        f"{target.platform}{lacks}. Copy it there as a whole; then {folder}/install"
    )


def follow(
    first: Iterable[Requirement], target: Target, without: Collection[str], wheels: Path
) -> tuple[list[Path], list[Requirement]]:
    """Fetches the wheels of all that is needed; returns them, and what of it is left out.

    Raises:
        OfflineError: a package has no wheel for the machine.
    """
    found: dict[str, Path] = {}
    left_out: dict[str, Requirement] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    wave = [needed for needed in first if _applies(needed, target, ())]
    while wave:
        new: dict[tuple[str, frozenset[str]], Requirement] = {}
        for needed in wave:
            name = canonicalize_name(needed.name)
            if name in without:
                left_out.setdefault(name, needed)
            elif (name, frozenset(needed.extras)) not in seen:
                new[name, frozenset(needed.extras)] = needed
        seen |= new.keys()
        missing = {name: needed for (name, _), needed in new.items() if name not in found}
        if missing:
            _download([_plain(needed) for needed in missing.values()], target, wheels)
        found |= {parse_wheel_filename(path.name)[0]: path for path in wheels.glob("*.whl")}
        wave = [
            further
            for (name, extras) in new
            for further in _required(found[name])
            if _applies(further, target, extras)
        ]
    return list(found.values()), list(left_out.values())


def _requirements(extras: Sequence[str]) -> list[Requirement]:
    """Those of the checkout, of these extras, and of its build, as an editable install needs it."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    named = [*about["project"]["dependencies"], *about["build-system"]["requires"]]
    for extra in extras:
        named += about["project"]["optional-dependencies"][extra]
    with contextlib.chdir(ROOT):
        named += get_requires_for_build_editable()
    return [Requirement(text) for text in named]


def _copy_checkout(place: Path) -> None:
    """As a source distribution has it: what git knows, and the bundle, which the build makes."""
    with TemporaryDirectory() as scratch:
        build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist"]
        done = subprocess.run(
            [*build, "--directory", scratch], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise OfflineError(f"the checkout cannot be packed:\n{done.stdout}{done.stderr}")
        (packed,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(packed) as archive:
            archive.extractall(scratch, filter="data")
        shutil.move(packed.with_name(packed.name.removesuffix(".tar.gz")), place)


def _applies(needed: Requirement, target: Target, extras: Collection[str]) -> bool:
    if needed.marker is None:
        return True
    return any(
        needed.marker.evaluate({**target.markers, "extra": extra}) for extra in extras or ("",)
    )


def _download(named: Sequence[str], target: Target, wheels: Path) -> None:
    print(f"fetching {', '.join(named)}", file=sys.stderr, flush=True)
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
    done = subprocess.run(
        [
            *pip,
            "--no-input",
            "--no-deps",
            "--only-binary=:all:",
            *("--dest", str(wheels)),
            *("--constraint", str(ROOT / "env" / "constraints.txt")),
            *target.for_pip,
            *named,
        ],
        check=False,
    )
    if done.returncode:
        raise OfflineError(
            f"pip could not fetch all for Python {target.python} on {target.platform} (above)"
        )


def _plain(needed: Requirement) -> str:
    """Without extras and markers, which have been looked at."""
    return f"{needed.name}{needed.specifier}"


def _required(wheel: Path) -> Iterator[Requirement]:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [n for n in packed.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
        text = packed.read(name).decode("utf-8")
    for line in HeaderParser().parsestr(text).get_all("Requires-Dist", []):
        yield Requirement(line)


if __name__ == "__main__":
    sys.exit(main())
