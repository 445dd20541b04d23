"""What emulated hosts really get: their links and their processors, all of them busy at once."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from workbench.store.errors import HostsError

GAUGE = Path(__file__).with_name("gauge.py")

CommandLine = Callable[[int, Sequence[str]], list[str]]
"""Makes a command line run on the host of an index."""


@dataclass(frozen=True)
class HostMeasurement:
    """What was measured of emulated hosts.

    Attributes:
        bandwidths: the payload in bytes/s from each host to the next one, from the last to
            the first; all at once, as in a ring. Empty for a single host.
        speeds: the share of its cores' time that each host gets while all hosts compute.
    """

    bandwidths: tuple[float, ...]
    speeds: tuple[float, ...]


def measure(
    command: CommandLine, addresses: Sequence[str], threads: Sequence[int], s: float
) -> HostMeasurement:
    """Keeps every core, then every link, busy for some seconds.

    Args:
        command: a function that makes a command line run on the host of an index.
        s: the seconds for the processors, and again for the links.

    Raises:
        HostsError: a host did not measure anything.
    """
    hosts = range(len(addresses))
    with _gauges(command, "compute", [i for i in hosts for _ in range(threads[i])], s) as gauges:
        _start(gauges)
        found = [(host, _result(process)) for host, process, _ in gauges]
    shares = [sum(share for host, share in found if host == i) / threads[i] for i in hosts]
    if len(hosts) == 1:
        return HostMeasurement((), tuple(shares))
    receivers = [(i + 1) % len(hosts) for i in hosts]
    with (
        _gauges(command, "receive", receivers, s) as receiving,
        _gauges(command, "send", hosts, s) as sending,
    ):
        _start(receiving)
        for (_, process, _), (receiver, _, port) in zip(sending, receiving, strict=True):
            _tell(process, f"{addresses[receiver]} {port}")
        return HostMeasurement(
            tuple(_result(process) for _, process, _ in receiving), tuple(shares)
        )


Gauge = tuple[int, "subprocess.Popen[str]", str]  # host, process, what it told when it was ready


@contextmanager
def _gauges(
    command: CommandLine, mode: str, hosts: Sequence[int], seconds: float
) -> Iterator[list[Gauge]]:
    """Starts one measuring process on each of these hosts and waits for it; ends them at last."""
    processes: list[subprocess.Popen[str]] = []
    argv = [sys.executable, "-IS", str(GAUGE), mode, str(seconds)]
    try:
        for host in hosts:
            processes.append(
                subprocess.Popen(
                    command(host, argv),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield [
            (host, process, _line(process).removeprefix("ready").strip())
            for host, process in zip(hosts, processes, strict=True)
        ]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _start(gauges: Sequence[Gauge]) -> None:
    for _, process, _ in gauges:
        _tell(process, "go")


def _tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    print(line, file=process.stdin, flush=True)


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    if line := process.stdout.readline():
        return line
    said = process.communicate()[1].strip()
    raise HostsError(f"an emulated host could not be measured:\n{said}")


def _result(process: "subprocess.Popen[str]") -> float:
    return float(_line(process))
