"""Hiccups: ranks, links between hosts and disks stand still for 2 to 10 s while a run goes on.

None of them is a fault, and none may be taken for one. Ranks are on emulated hosts, one each,
brought by SSH as to real ones: whoever cuts a host's link cuts what ranks send each other, and what
their host says of them. Where emulated hosts cannot be made, ranks are on this host, and links do
not stand still; disks do where one can be mounted: the one of runs, checkpoints and the cluster's
store. Ranks are stopped by a signal that the cluster knows nothing of.
"""

import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from workbench.bench.recovery.disk import Disk, disk
from workbench.bench.report import Cell
from workbench.client.cluster import Cluster
from workbench.client.run.run import Run
from workbench.hosts.emulated.hosts import Hosts
from workbench.plan.experiment.experiment import Experiment
from workbench.store.errors import HostsError
from workbench.store.record import AttemptRecord

RANKS = 2
TIMEOUT_S = 60.0
LEAST_S, MOST_S = 2.0, 10.0
GOES_ON_WITHIN_S = 60.0
END_S = 600.0
LOOK_S = 0.02
STEPS = 1_000_000  # more than it makes


class Ward:
    """A run that goes on while what it runs on is paused, again and again.

    Args:
        cluster: the cluster that it runs on.
        hosts: the emulated hosts of its ranks; None: ranks are on this host.
        runs: the disk of the run and of the cluster; None: it has none of its own.
        experiment: the experiment that trains; its length is set here.
        seed: the seed of what stands still, and for how long.

    Attributes:
        run: the run.
    """

    def __init__(
        self,
        cluster: Cluster,
        hosts: Hosts | None,
        runs: Disk | None,
        experiment: Experiment,
        seed: int = 0,
    ) -> None:
        self._cluster, self._hosts, self._disk = cluster, hosts, runs
        self._rng = random.Random(seed)
        self._experiment = experiment
        self.run = cluster.train(experiment.replace(steps=STEPS))
        self._comes_to(1)

    def stumble(self) -> dict[str, Cell]:
        """One hiccup, and how the run went on, as a row."""
        may = {"rank": True, "link": self._hosts is not None, "disk": self._disk is not None}
        what = self._rng.choice([each for each, can in may.items() if can])
        which, seconds = self._rng.randrange(RANKS), self._rng.uniform(LEAST_S, MOST_S)
        pause, go_on = {"rank": self._rank, "link": self._link, "disk": self._of_disk}[what](which)
        pause()
        try:
            time.sleep(seconds)
        finally:
            go_on()
        began, done = time.monotonic(), self._step()
        goes_on = self._comes_to(done + 3)  # two were under way, perhaps
        row: dict[str, Cell] = {"hiccup": what, "of": which, "s": round(seconds, 1)}
        row["goes on"] = "yes" if goes_on else "NO"
        return row | {
            "after s": round(time.monotonic() - began, 2),
            "attempts lost": len(lost := self.lost),
            "why": lost[-1].reason.partition("\n")[0] if lost else "",
        }

    @property
    def lost(self) -> tuple[AttemptRecord, ...]:
        """The attempts that were given up so far."""
        assert self.run.id is not None
        return self._cluster.link.store.job(self.run.id).attempts

    def difference(self) -> float:
        """Ends the run; the greatest difference of a step's loss from that of an undisturbed run.

        Raises:
            RunError: one of the runs failed.
        """
        self.run.stop()
        losses = _losses(self.run.wait(END_S))
        straight = self._cluster.train(self._experiment.replace(steps=len(losses))).wait(END_S)
        return max(abs(a - b) for a, b in zip(losses, _losses(straight), strict=True))

    def _rank(self, which: int) -> tuple[Callable[[], object], Callable[[], object]]:
        process = self._cluster.link.process_of(self.run.engines[which])
        # The relay of an engine on another host hands this on; SIGSTOP would stop the relay.
        stop = signal.SIGSTOP if self._hosts is None else signal.SIGTSTP
        return lambda: process.send(stop), lambda: process.send(signal.SIGCONT)

    def _link(self, which: int) -> tuple[Callable[[], object], Callable[[], object]]:
        hosts = self._hosts
        assert hosts is not None
        return lambda: hosts.disconnect(which), lambda: hosts.reconnect(which)

    def _of_disk(self, _which: int) -> tuple[Callable[[], object], Callable[[], object]]:
        assert self._disk is not None
        return self._disk.freeze, self._disk.thaw

    def _step(self) -> int:
        newest = self.run.rows.newest(RANKS)
        return min((int(row["step"]) for row in newest), default=-1)

    def _comes_to(self, step: int) -> bool:
        deadline = time.monotonic() + GOES_ON_WITHIN_S
        while self._step() < step:
            if self.run.is_done or time.monotonic() > deadline:
                return False
            time.sleep(LOOK_S)
        return True


@contextmanager
def ward(experiment: Experiment) -> Iterator[Ward]:
    """A run of an experiment for two ranks, on emulated hosts where there can be some."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts, profile = None, None
        runs = stack.enter_context(disk(folder))  # before hosts, so that they see it
        if shutil.which("sshd", path="/usr/sbin:/usr/bin"):
            with suppress(HostsError):
                hosts = stack.enter_context(Hosts(RANKS))
        if hosts is not None:
            profile = str(hosts.ssh(folder / "profile"))
        directory = (folder if runs is None else runs.root) / "runs"
        cluster = stack.enter_context(
            Cluster(RANKS, profile=profile, directory=directory, timeout=TIMEOUT_S)
        )
        yield Ward(cluster, hosts, runs, experiment)


def _losses(run: Run) -> list[float]:
    """The loss of each step of a run, from the first on."""
    found = {int(row["step"]): row["loss"] for row in run.rows}
    return [found[step] for step in range(len(found))]
