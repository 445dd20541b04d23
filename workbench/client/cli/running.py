"""`run`, `jobs` and `attach`."""

import sys
from argparse import Namespace

from workbench.client.cli.progress import Progress
from workbench.client.cluster import Cluster
from workbench.client.ending import STORE
from workbench.client.jobs.table import lines
from workbench.client.run.run import Run
from workbench.plan.experiment import Experiment
from workbench.store import registry
from workbench.store.errors import ClusterError
from workbench.store.store import Store
from workbench.supervisor import supervisor_of


def run(options: Namespace) -> int:
    """Runs an experiment; an interrupt stops it after its current step."""
    experiment = Experiment.load(options.experiment)
    cluster = _cluster(options, experiment)
    started = cluster.train(experiment, resume=options.resume, priority=options.priority)
    print(f"job {started.id} of cluster {cluster.name}, in {started.directory}", file=sys.stderr)
    if options.detach:
        return 0
    try:
        Progress(started).follow()
    except KeyboardInterrupt:
        print("\nstopping after this step; a checkpoint is left", file=sys.stderr)
        started.stop()
        Progress(started).follow()
    return _told(started)


def jobs(options: Namespace) -> int:
    """Prints the jobs of one cluster, or of all that are known here."""
    if options.cluster is not None:
        folders = [registry.find(options.cluster)]
    else:
        folders = [folder for _name, folder in registry.known()]
    if not folders:
        print("no cluster is known here; python -m workbench run starts one")
    for folder in folders:
        kept = (
            "" if supervisor_of(folder) is not None else ", which has ended; attach starts it again"
        )
        print(f"cluster {registry.name_of(folder)} in {folder.parent}{kept}")
        found = Store(folder / STORE, read_only=True).jobs()
        print(lines(job for job in found if job.kind == "train"))
    return 0


def attach(options: Namespace) -> int:
    """Follows jobs until they end; an interrupt leaves them alone."""
    cluster = Cluster.attach(options.cluster)
    if options.job is not None:
        followed = [cluster.jobs[options.job]]
    else:
        followed = [job for job in cluster.jobs if not job.is_done]
    if not followed:
        print(f"no job goes on in {cluster.name}")
    try:
        for job in followed:
            print(f"job {job.id}: {job.experiment!r}", file=sys.stderr)
            Progress(job).follow()
    except KeyboardInterrupt:
        print("\nleft; it goes on", file=sys.stderr)
        return 0
    return max((_told(job) for job in followed), default=0)


def _cluster(options: Namespace, experiment: Experiment) -> Cluster:
    size = options.engines or experiment.plan.world_size
    if options.cluster is None:
        return Cluster(size, directory=options.directory)
    if options.cluster in dict(registry.known()):
        return Cluster.attach(options.cluster)
    return Cluster(size, directory=options.directory, name=options.cluster)


def _told(run: Run) -> int:
    """Says how a run ended; the exit status that goes with it."""
    for note in run.notes:
        print(note, file=sys.stderr)
    if run.error is not None:
        raise ClusterError(str(run.error)) from run.error
    print(f"{run.state}: {run.directory}")
    return 0
