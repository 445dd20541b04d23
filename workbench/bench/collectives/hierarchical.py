"""`bench collectives` over two emulated hosts of two engines each, with a link of 1 Gbit/s.

In a group of ranks of several hosts, "workbench" and "bucket" are hierarchical: the ranks of a host
reduce through shared memory, and each sends its part over the link. Needs root on Linux.
"""

from dataclasses import replace

from workbench.bench.collectives.collectives import ENGINES, compare
from workbench.bench.collectives.timing import KIB, MIB
from workbench.bench.report import Report
from workbench.client.cluster import Cluster
from workbench.hosts.emulated.hosts import Hosts

QUICK = {KIB: 20, 64 * KIB: 10, MIB: 2}
FULL = {KIB: 100, 64 * KIB: 20, MIB: 5, 4 * MIB: 2, 16 * MIB: 1, 64 * MIB: 1}


def run(*, quick: bool) -> Report:
    """Measures seconds of one all-reduce; `quick` up to 1 MB, in fewer rounds."""
    turns, rounds = (QUICK, 2) if quick else (FULL, 7)
    with (
        Hosts(2, bandwidth="1gbit") as hosts,
        Cluster(ENGINES, hosts=hosts, timeout=120.0) as cluster,
    ):
        measured = hosts.measure()
        report = compare(cluster, turns, rounds)
    links = ", ".join(f"{8 * each / 1e9:.2f}" for each in measured.bandwidths)
    note = f"2 hosts x 2 engines on links of 1 Gbit/s; they carried {links} Gbit/s of payload."
    return replace(report, bench="hierarchical", notes=(*report.notes, note))
