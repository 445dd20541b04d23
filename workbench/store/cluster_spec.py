"""What a cluster is: a text file in its folder, which a person can read and its processes do.

Beside it: what an engine computes on, and which launcher brings engines to other hosts.
"""

import json
import math
import os
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from workbench.plan.extension.sealed import KEY_BYTES
from workbench.plan.io.files import make_whole, replacing
from workbench.store.errors import ClusterError
from workbench.store.process import ProcessIdentity

CONFIG = "ipcluster_config.py"
LEAST_PORTS = 32  # the controller takes some twenty
_VARIABLE = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a supervisor is told of engines beyond this host; plain values.

    Attributes:
        config: the folder of an IPython profile, with `ipcluster_config.py`.
        address: the address of this host for the others; "": whichever of its addresses they reach.
        interface: the interface of the other hosts; "": the one by which each reaches this host.
        ports: the first and last port that this host listens on; None: any.
        notice_s: the seconds before an allocation ends in which runs are stopped.
        start_within_s: the seconds to wait for all agents.
    """

    engines: int
    config: str
    address: str = ""
    interface: str = ""
    ports: tuple[int, int] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    notice_s: float = 60.0
    start_within_s: float = 600.0


@dataclass(frozen=True)
class Profile:
    """An IPython profile whose `ipcluster_config.py` names a launcher, and what the network wants.

    Args:
        name: the name of the profile, or its folder.
        address: the IPv4 address of this host for the others; "": whichever they reach. The
            controller and the store where ranks meet listen there alone.
        interface: the interface of every other host for what ranks send each other, "ib0"; "": the
            one by which a host reaches this one.
        ports: the first and last port that this host listens on, 32 ports at least; None: any.
            Ranks listen on ports of the system's choice.
        environment: the names of variables whose values here the engines get, too.
        notice_s: the seconds before the end of a batch system's allocation in which runs are
            paused, each with a checkpoint.
        start_within_s: the seconds to wait for the hosts, a batch queue's waiting time included.

    Raises:
        ValueError: an argument has no possible value.
    """

    name: str
    address: str = ""
    interface: str = ""
    ports: tuple[int, int] | None = None
    environment: tuple[str, ...] = ()
    notice_s: float = 60.0
    start_within_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a profile has a name, or is the folder of one; got ''")
        if self.ports is not None:
            first, last = self.ports
            if not (1024 <= first and last <= 65535 and last - first + 1 >= LEAST_PORTS):
                raise ValueError(
                    f"ports are (first, last), {LEAST_PORTS} or more from 1024 to 65535, got "
                    f"{self.ports}"
                )
        if isinstance(self.environment, str) or not all(map(_VARIABLE.fullmatch, self.environment)):
            raise ValueError(f"environment holds names of variables, got {self.environment!r}")
        for name in ("notice_s", "start_within_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} is a positive number of seconds, got {getattr(self, name)!r}"
                )

    def launch(self, engines: int) -> Launch:
        """Returns what a supervisor is told.

        Raises:
            ClusterError: there is no such profile; or a variable has no value here.
        """
        if absent := [name for name in self.environment if name not in os.environ]:
            raise ClusterError(f"engines are to get {', '.join(absent)}, which has no value here")
        return Launch(
            engines=engines,
            config=str(self.folder()),
            address=self.address,
            interface=self.interface,
            ports=self.ports,
            environment={name: os.environ[name] for name in self.environment},
            notice_s=self.notice_s,
            start_within_s=self.start_within_s,
        )

    def folder(self) -> Path:
        """Returns where its `ipcluster_config.py` is.

        Raises:
            ClusterError: there is no such file; the text says where it would be, and what it holds.
        """
        home = Path(os.environ.get("IPYTHONDIR") or "~/.ipython").expanduser()
        named = home / f"profile_{self.name}"
        for folder in (Path(self.name).expanduser(), named):
            if (folder / CONFIG).is_file():
                return folder.absolute()
        raise ClusterError(
            f"there is no profile {self.name!r}: {named / CONFIG} is not there. For Slurm it says "
            "`c = get_config()` and `c.Cluster.engine_launcher_class = 'slurm'`; for SSH, MPI and "
            "more, see notebooks/07-beyond-one-machine.ipynb"
        )


@dataclass(frozen=True)
class EngineDevice:
    """What one engine computes on.

    Attributes:
        kind: the kind of device: "cuda" or "cpu".
        name: the GPU's product name, or "cpu".
        memory_bytes: the memory of the GPU, or of the whole host, in bytes.
        gpu: the value of `CUDA_VISIBLE_DEVICES` in the engine; "" for none.
        sharers: the number of engines that have this same GPU, or these same cores; 1: it alone.
    """

    kind: str
    host: str
    name: str
    cores: tuple[int, ...]
    threads: int
    memory_bytes: int
    gpu: str = ""
    sharers: int = 1

    @property
    def backend(self) -> str:
        """The torch.distributed backend for engines like this: nccl wants a GPU for each."""
        return "nccl" if self.kind == "cuda" and self.sharers == 1 else "gloo"

    def __str__(self) -> str:
        shared = f", shared by {self.sharers} engines" if self.sharers > 1 else ""
        if self.kind == "cuda":
            return f"{self.name}{shared}"
        cores = ", ".join(map(str, self.cores))
        return f"core{'s' * (len(self.cores) > 1)} {cores}{shared}"


@dataclass(frozen=True)
class Site:
    """Where a process runs.

    Attributes:
        enter: the beginning of the command line that leads there; the process keeps its id.
    """

    enter: tuple[str, ...]
    environment: Mapping[str, str]


def of_interface(name: str) -> dict[str, str]:
    """Returns the variables by which gloo and nccl communicate through an interface."""
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


HERE = Site((), of_interface("lo0" if sys.platform == "darwin" else "lo"))


FILE = "cluster.json"
KEY = "key"
SERVER = "workbench.server"
VERSION = 2  # of this file, and of what a notebook, a supervisor and a job server say to each other


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A cluster, as its supervisor makes it.

    Attributes:
        devices: the device of each engine; the last one has all of this host, and is the assistant:
            it does what is done once for all ranks, and stands in for an engine that died.
        sites: the place where each of them runs.
        address: the address of this host at which all of them can reach it.
        timeout_s: the seconds that a rank waits for the others.
        suspicion_s: the seconds after which a process that is stopped by a signal is told of.
        lease_s: the seconds after which it is ended, and a host that is silent counts as lost.
        linger_s: the seconds that the cluster stays when nobody is attached and nothing is to be
            done.
        bound_to: the process that the cluster must not outlive, whatever it has to do; None: there
            is none.
        environment: the variables of all its processes, on top of the environment of whoever starts
            the supervisor.
        server: the module that is the job server; it is called with the folder.
        launch: how engines come to other hosts; None: they are on this one. With it, devices and
            sites are known, and saved, when the hosts are there.
        ends_at: when the hosts are taken away, in seconds since the epoch; None: that is not known.
        version: `VERSION`.

    Raises:
        ValueError: a field has no possible value.
    """

    devices: tuple[EngineDevice, ...] = ()
    sites: tuple[Site, ...] = ()
    address: str = ""
    timeout_s: float = 30.0
    suspicion_s: float = 1.0
    lease_s: float = 20.0
    linger_s: float = 60.0
    bound_to: ProcessIdentity | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    server: str = SERVER
    launch: Launch | None = None
    ends_at: float | None = None
    version: int = VERSION

    def __post_init__(self) -> None:
        is_settled = bool(self.devices) or self.launch is None
        if is_settled and (len(self.devices) < 2 or len(self.devices) != len(self.sites)):
            raise ValueError(
                f"a cluster has a device and a site for each engine and for the assistant, got "
                f"{len(self.devices)} devices and {len(self.sites)} sites"
            )
        for name in ("timeout", "suspicion", "lease"):
            if not (seconds := getattr(self, f"{name}_s")) > 0:
                raise ValueError(f"{name} must be a positive number of seconds, got {seconds!r}")
        if not self.linger_s >= 0:
            raise ValueError(f"linger_s is a number of seconds, not negative, got {self.linger_s}")

    @property
    def num_engines(self) -> int:
        """Engines that take ranks: all but the assistant."""
        return len(self.devices) - 1 if self.launch is None else self.launch.engines

    def save(self, folder: Path) -> None:
        """Writes it into a cluster's folder."""
        with replacing(folder / FILE) as part:
            part.touch(mode=0o600)  # variables that engines get may be secrets
            part.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads what a cluster's folder says.

        Raises:
            ClusterError: there is no such file in the folder, or none that this workbench can read.
        """
        path = folder / FILE
        try:
            fields = json.loads(path.read_text())
            version = fields["version"]
        except FileNotFoundError:
            raise ClusterError(f"{folder} is no cluster's folder: {FILE} is not there") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ClusterError(f"{path} cannot be read: {error}") from error
        if version != VERSION:
            raise ClusterError(
                f"{path} has version {version}, and this workbench reads version {VERSION}: use "
                "the workbench that made it, or start another cluster"
            )
        try:
            return cls(**{**fields, **_parts(fields)})
        except (KeyError, TypeError, ValueError) as error:
            raise ClusterError(f"{path} cannot be read: {error}") from error


def key_of(folder: Path) -> bytes:
    """Returns the key of a cluster, which is made when it is first asked for.

    Code and objects lie in the cluster's folder under a MAC with this key, which only its owner can
    read; see `plan.extension.sealed`.

    Raises:
        OSError: the folder is gone, or is somebody else's.
    """
    path = folder / KEY
    if not path.exists():
        make_whole(path, os.urandom(KEY_BYTES), mode=0o600)  # or another process was first
    return path.read_bytes()


def identity(folder: Path) -> str:
    """Returns ipyparallel's name of a cluster; no other one of this host has the same."""
    path = folder.absolute()
    return f"{path.name}-{zlib.crc32(str(path).encode()):08x}"


def connection_file(folder: Path, who: str) -> Path:
    """Returns the file in which the controller says how a "client" or an "engine" reaches it."""
    return folder / "profile" / "security" / f"ipcontroller-{identity(folder)}-{who}.json"


def _parts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Values that are made of others."""
    devices = (
        EngineDevice(**{**each, "cores": tuple(each["cores"])}) for each in fields["devices"]
    )
    sites = (Site(tuple(each["enter"]), each["environment"]) for each in fields["sites"])
    owner = fields["bound_to"]
    bound_to = None if owner is None else ProcessIdentity(**owner)
    launch = _launch(fields.get("launch"))
    return {
        "devices": tuple(devices),
        "sites": tuple(sites),
        "bound_to": bound_to,
        "launch": launch,
    }


def _launch(fields: Mapping[str, Any] | None) -> Launch | None:
    if fields is None:
        return None
    ports = fields["ports"]
    return Launch(**{**fields, "ports": None if ports is None else tuple(ports)})
