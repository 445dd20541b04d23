"""What a run ran with: `environment.json` in its folder.

    this process    versions, repository, hosts, module, ...     before the run is submitted
    job server      when it was submitted, started and ended     when it has ended

Nothing secret is in it: of the process's environment variables, none is kept.
"""

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from workbench.client.calibration import cache
from workbench.client.engines import Engines
from workbench.client.records.source import (
    Repository,
    SourceText,
    repository,
    sources,
    submitted_by,
)
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.io.files import write_whole
from workbench.plan.io.html import Markup, element, frame_of, save, table, text_table
from workbench.plan.io.units import size
from workbench.plan.machine.machine import Machine
from workbench.store.cluster_spec import ClusterSpec, EngineDevice
from workbench.store.errors import ClusterError
from workbench.store.run_folder import ENVIRONMENT, JobTimes

if TYPE_CHECKING:
    import pandas

MACHINE = "machine.toml"
_PACKAGES = ("torch", "torchvision", "numpy", "ipyparallel")


@dataclass(frozen=True)
class HostRecord:
    """One of the hosts that a cluster's engines are on.

    Attributes:
        processor: the model of its processor; "" for a host that this process was not on.
        cores: the logical cores that engines are pinned to; 0: they are pinned to none.
        memory_bytes: the memory of the host, or of its largest GPU, in bytes.
    """

    name: str
    processor: str
    cores: int
    memory_bytes: int
    gpus: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What a run ran with, as it was when it was submitted.

    Attributes:
        versions: the version of Python, of each package that matters, and of the system.
        repository: the git repository of the directory; None: it is in none.
        directory: the working directory of the process that submitted the run.
        submitted_by: the command line of that process, or its notebook.
        hosts: the hosts of the cluster's engines.
        devices: what each of the cluster's engines computes on: its cores and threads too.
        backend: the torch.distributed backend, "gloo" or "nccl".
        machine: the fingerprint of the hardware, under which a calibrated machine is kept.
        seed: the seed of weights, data and dropout.
        model: the model's name.
        cluster: the name of the cluster.
        module: the module as it prints itself; "" for a model that is built by name.
        sources: the texts of the person's own classes and functions in model and experiment.
        times: when it was submitted, started and ended.
    """

    versions: Mapping[str, str]
    repository: Repository | None
    directory: str
    submitted_by: str
    hosts: tuple[HostRecord, ...]
    devices: tuple[EngineDevice, ...]
    backend: str
    machine: str
    seed: int
    model: str
    cluster: str = ""
    module: str = ""
    sources: tuple[SourceText, ...] = ()
    times: JobTimes = field(default_factory=JobTimes)

    @classmethod
    def of(
        cls, engines: Engines, experiment: Experiment, module: nn.Module | None = None
    ) -> "Environment":
        """What an experiment would run with now.

        Args:
            engines: the engines of the cluster.
            experiment: what is to run.
            module: a module with other values than the one that was traced; None: that one.
        """
        devices, source = engines.devices, experiment.plan.graph.source
        traced = source.module if module is None else module
        ranks = devices[: experiment.plan.world_size]
        is_here = ClusterSpec.load(engines.folder).launch is None
        return cls(
            versions=versions(),
            repository=repository(Path.cwd()),
            directory=str(Path.cwd()),
            submitted_by=submitted_by(),
            hosts=_hosts(devices, cache.processor() if is_here else ""),
            devices=devices,
            backend="nccl" if all(each.backend == "nccl" for each in ranks) else "gloo",
            machine=cache.fingerprint(ranks, engines.hosts),
            seed=experiment.seed,
            model=source.name,
            cluster=engines.name,
            module="" if traced is None else repr(traced),
            sources=sources(traced, experiment),
        )

    def write(self, directory: Path) -> None:
        """Writes it into a run's folder, and the machine that was calibrated for it, if any.

        That of an earlier submission, which the run goes on from, is kept under another name.
        """
        path = directory / ENVIRONMENT
        if path.exists():
            named = (directory / f"environment-{number}.json" for number in count(1))
            path.rename(next(other for other in named if not other.exists()))
        write_whole(path, json.dumps(asdict(self), indent=1))
        if (kept := cache.place(self.machine)).exists():
            write_whole(directory / MACHINE, kept.read_bytes())

    @classmethod
    def load(cls, directory: Path) -> "Environment | None":
        """What a run's folder says; None: nothing.

        Raises:
            ClusterError: the file cannot be read.
        """
        path = directory / ENVIRONMENT
        try:
            return _ADAPTER.validate_python(json.loads(path.read_text("utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, ValidationError) as error:
            raise ClusterError(f"{path} cannot be read: {error}") from error

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each thing that is known, but for the sources: its name and value."""
        rows = [{"environment": name, "value": value} for name, value in self.lines()]
        return frame_of(rows, ("environment", "value"))

    def save(self, path: str | Path) -> None:
        """Writes its table into a file: "x.html" or "x.csv".

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path)

    def lines(self) -> list[tuple[str, str]]:
        """(what, how it is said) of all but the sources, for tables."""
        git = self.repository
        dirty = " and changes that are not committed" if git is not None and git.is_dirty else ""
        rows = [
            ("submitted", _clock(self.times.submitted)),
            ("started", _clock(self.times.started)),
            ("ended", _clock(self.times.ended)),
            ("submitted by", self.submitted_by),
            ("directory", self.directory),
            ("commit", "" if git is None else f"{git.commit or 'none'} ({git.branch}){dirty}"),
            *((name, value) for name, value in self.versions.items()),
            *((f"host {each.name}", _told(each)) for each in self.hosts),
            ("threads per engine", _each([str(each.threads) for each in self.devices])),
            ("engines on", _each([str(each) for each in self.devices])),
            ("backend", self.backend),
            ("machine", self.machine),
            ("seed", str(self.seed)),
        ]
        return [(name, value) for name, value in rows if value]

    def __str__(self) -> str:
        return "\n".join(text_table(("environment", ""), self.lines()))

    def _repr_html_(self) -> Markup:
        return element("div", table(("environment", ""), self.lines()))


_ADAPTER = TypeAdapter(Environment)


def machine_of(directory: Path) -> Machine | None:
    """The machine that was calibrated for a run's hardware; None: none was then.

    Raises:
        MachineError: its file is damaged.
    """
    path = directory / MACHINE
    return Machine.load(path) if path.exists() else None


def versions() -> dict[str, str]:
    """The versions of Python, of what computes, and of the system."""
    workbench = sys.modules[__name__.partition(".")[0]]
    found = {"python": platform.python_version(), "workbench": workbench.__version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return {**found, "system": platform.platform()}


def _hosts(devices: Sequence[EngineDevice], processor: str) -> tuple[HostRecord, ...]:
    found = []
    for name in dict.fromkeys(each.host for each in devices):
        own = [each for each in devices if each.host == name]
        gpus = {each.gpu: each.name for each in own if each.kind == "cuda"}
        cores = {core for each in own for core in each.cores}
        most = max(each.memory_bytes for each in own)
        found.append(HostRecord(name, processor, len(cores), most, tuple(gpus.values())))
    return tuple(found)


def _told(host: HostRecord) -> str:
    cores = f"engines on {host.cores} of its cores" if host.cores else ""
    parts = (host.processor, cores, size(host.memory_bytes), *host.gpus)
    return ", ".join(filter(None, parts))


def _each(values: Sequence[str]) -> str:
    """What all have, once, or what each has."""
    return values[0] if len(set(values)) == 1 else "; ".join(values)


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
