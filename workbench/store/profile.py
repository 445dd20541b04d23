"""Which launcher brings engines to other hosts, and how they and this host find each other."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from workbench.store.errors import ClusterError

CONFIG = "ipcluster_config.py"
LEAST_PORTS = 32  # the controller takes some twenty
_VARIABLE = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a supervisor is told of engines beyond this host; plain values.

    Attributes:
        engines: the number of engines.
        config: the folder of an IPython profile, with `ipcluster_config.py`.
        address: the address of this host for the others; "": whichever of its addresses they reach.
        interface: the interface of the other hosts; "": the one by which each reaches this host.
        ports: the first and last port that this host listens on; None: any.
        environment: the variables of the engines.
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
