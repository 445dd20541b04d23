"""What a strategy of one's own is checked for: on ranks, against a plain loop in one process."""

import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from workbench.client.cluster import Cluster
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.experiment.sync import OwnStrategy, Strategy
from workbench.plan.extension.extension import Check
from workbench.plan.extension.user_object import OwnObjectError
from workbench.plan.plans.plan import Plan
from workbench.predict.traffic.traffic import traffic_of
from workbench.program.step import program_of
from workbench.store.errors import RunError
from workbench.train.optimizer.rules import try_out
from workbench.train.verify.verify import Observed
from workbench.train.verify.whole_model import in_one_process

_TOLERANCE = 1e-9
_INPUTS, _CLASSES, _ROWS = 6, 5, 3


def checks_of(strategy: Strategy, cluster: Cluster) -> list[Check]:
    """Trains a small model under a strategy on all engines of a cluster, and looks at it.

    Checked are: that it works element by element; weights in the end against a plain loop that
    calls the same methods, whole and, where gradients are exchanged, with all layers cut; that
    ranks have the same bits whenever replicas are to be equal; that what each rank receives in
    each step is what was predicted; that a run that is resumed goes on as the uninterrupted one;
    and that another plan leaves weights and states as they were.

    Raises:
        ExperimentError: what it states excludes each other.
        ClusterError: engines are in use.
    """
    sync = OwnStrategy(strategy)
    try:
        try_out(strategy, sync.timing)
    except OwnObjectError as error:
        return [Check("works element by element", False, str(error))]
    found = [Check("works element by element", True, "parts give what the whole gives")]
    experiment, module = _experiment(sync, len(cluster))
    try:
        return found + list(_trained(experiment, module, cluster))
    except RunError as error:
        return [*found, Check("runs", False, str(error))]


def _experiment(sync: OwnStrategy, world: int) -> tuple[Experiment, nn.Module]:
    timing = sync.timing
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        hidden = max(4, world)
        module = nn.Sequential(nn.Linear(_INPUTS, hidden), nn.Tanh(), nn.Linear(hidden, _CLASSES))
    graph = trace(module, input_shape=(_INPUTS,))
    size = _ROWS * world
    return Experiment(
        plan=Plan.data_parallel(graph, world),
        data=Synthetic(samples=_samples(size), classes=_CLASSES),
        batch_size=size,
        optimizer=SGD(lr=0.05, momentum=0.9),
        steps=timing.warmup + timing.late + 2 * timing.every + 2,
        precision="fp64",
        sync=sync,
    ), module


def _samples(batch_size: int) -> int:
    """So many that every third batch is shorter."""
    return 2 * batch_size + 1


def _trained(experiment: Experiment, module: nn.Module, cluster: Cluster) -> Iterator[Check]:
    cut = Plan.hybrid(experiment.plan.graph, len(cluster))
    every = _observed(experiment, cut, module, cluster)
    expected = in_one_process(experiment, module)
    off = _off(every, expected)
    said = f"weights differ by {off:.2g} at most from a plain loop's"
    yield Check("computes what its methods say", off <= _TOLERANCE, said)
    if not experiment.sync.timing.of_weights:
        pieces = cluster.call("cut_weights", experiment.replace(plan=cut), module=module)
        off = max(_most(each[1], expected[each[0]], each[2]) for own in pieces for each in own)
        said = f"weights of layers that are cut differ by {off:.2g} at most"
        yield Check("the same with layers cut", off <= _TOLERANCE, said)
    yield _alike(every)
    yield _predicted(experiment, every)
    yield _all(every, lambda one: one.goes_on, "a resumed run", "the bits of the uninterrupted one")
    yield _all(every, lambda one: one.resharded, "another plan", "weights and states as they were")


def _observed(
    experiment: Experiment, cut: Plan, module: nn.Module, cluster: Cluster
) -> list[Observed]:
    folder, timing = cluster.folder / f"check-{uuid.uuid4().hex}", experiment.sync.timing
    folder.mkdir()
    try:
        return cluster.call(
            "own_strategy",
            experiment,
            module=module,
            directory=folder,
            cut=cut.to_toml(),
            saved_after=timing.warmup + timing.late + timing.every + 1,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _off(every: Sequence[Observed], expected: dict[str, torch.Tensor]) -> float:
    return max(
        _most(values, expected[name], None) for one in every for name, values in one.weights.items()
    )


def _alike(every: Sequence[Observed]) -> Check:
    steps = [
        step
        for step, digests in enumerate(zip(*(one.digests for one in every), strict=True))
        if len(set(digests)) > 1
    ]
    said = f"they differ after step {steps[0]}" if steps else "in every step that leaves them equal"
    return Check("all ranks have the same bits", not steps, said)


def _predicted(experiment: Experiment, every: Sequence[Observed]) -> Check:
    """Steps of a whole batch are predicted; an epoch's last one is shorter, and left out."""
    what, traffic = "traffic is as predicted", traffic_of(program_of(experiment))
    size = experiment.batch_size
    samples = _samples(size)
    received = 0
    for rank, one in enumerate(every):
        for step, rows in enumerate(one.traffic):
            if step % -(-samples // size) >= samples // size:
                continue
            predicted = sorted(traffic.rows(rank, step))
            if sorted(rows) != predicted:
                first = next(iter(set(rows) ^ set(predicted)))
                return Check(what, False, f"rank {rank}, step {step}: {first}")
            received += sum(row[-1] for row in rows)
    return Check(what, True, f"{received:,} bytes, every call of every step")


def _all(
    every: Sequence[Observed], is_so: Callable[[Observed], bool], who: str, what: str
) -> Check:
    ranks = [rank for rank, one in enumerate(every) if not is_so(one)]
    where = f"not on ranks {', '.join(map(str, ranks))}" if ranks else "on all ranks"
    return Check(f"{who} leaves {what}", not ranks, where)


def _most(values: object, expected: torch.Tensor, span: tuple[int, int, int] | None) -> float:
    mine = torch.tensor(values, dtype=torch.float64)
    if span is not None:
        expected = expected.narrow(*span)
    off = (mine.reshape(expected.shape) - expected).abs()
    return float(off.max()) if off.numel() else 0.0
