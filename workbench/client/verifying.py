"""What `Cluster.verify` runs, and how the ranks' findings become one."""

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from workbench.client.leases import Lease
from workbench.client.run.submitting import module_values
from workbench.model.tracing.trace import show_trains_same
from workbench.plan.experiment.experiment import (
    SGD,
    AnyOptimizer,
    Experiment,
    Loss,
    Synthetic,
)
from workbench.plan.plans.plan import Plan
from workbench.store.errors import EngineDied, RankError, RunError
from workbench.train.step.loss import Seen
from workbench.train.verify.verification import TOLERANCE, Coverage, Difference, Verification

# Large steps would show how fast two trajectories of rounding part, in fp32 by ReLUs that flip,
# and not whether a split computes the same.
GENTLE = SGD(lr=1e-3, momentum=0.9)
_NAMED = 5  # of what was not compared, in a note


def experiment_for(
    of: Plan | Experiment,
    *,
    batch_size: int | None,
    steps: int,
    precision: Literal["fp64", "fp32"],
    optimizer: AnyOptimizer | None,
    data: Any,
    seed: int | None,
    loss: Any = None,
) -> Experiment:
    """The experiment to run split and unsplit.

    Args:
        of: a plan; or an experiment, of which all else is kept that is not given here.
        precision: "fp64" or "fp32".

    Raises:
        ValueError: rounding would hide errors in this precision.
    """
    if precision not in TOLERANCE:
        valid = " or ".join(map(repr, TOLERANCE))
        raise ValueError(f"verify computes in {valid}, got {precision!r}")
    if isinstance(of, Experiment):
        asked = dict(batch_size=batch_size, optimizer=optimizer, data=data, seed=seed, loss=loss)
        given: dict[str, Any] = {n: value for n, value in asked.items() if value is not None}
        if of.schedule is not None:
            given["schedule"] = of.schedule.over(of.steps)  # the first steps of all
        return of.replace(steps=steps, precision=precision, **given)
    plan, size = of, 4 * of.world_size if batch_size is None else batch_size
    classes = max(2, plan.graph.num_classes)
    return Experiment(
        plan=plan,
        data=Synthetic(samples=max(1, size * steps), classes=classes) if data is None else data,
        loss=loss,
        batch_size=size,
        optimizer=GENTLE if optimizer is None else optimizer,
        steps=steps,
        precision=precision,
        seed=seed or 0,
    )


def carry_out(
    experiment: Experiment,
    module: nn.Module | None,
    lease: Lease,
    assistant: Lease,
    *,
    repeat: bool = True,
    seen: Seen | None = None,
) -> Verification:
    """Lets the assistant compute the unsplit model, then the ranks compare theirs; says so.

    Args:
        experiment: the experiment, made by `experiment_for`.
        module: a module with other values than the one that was traced; see `Cluster.train`.
        repeat: whether the ranks run twice.

    Raises:
        ModelError: `module` is needed and missing, or is another model than was traced.
        TraceError: what was traced computes something else than the module.
        RunError: a rank failed.
    """
    print(f"verifying {experiment.plan.graph.source.name}: unsplit model", end="", flush=True)
    show_trains_same(experiment.plan.graph)
    folder = assistant.link.folder
    number = uuid.uuid4().hex  # other notebooks verify, too
    start = folder / f"start-{number}.safetensors"
    reference = folder / f"reference-{number}.safetensors"
    found = folder / f"found-{number}"
    by_rank = [Difference.file(found, rank) for rank in range(experiment.plan.world_size)]
    weights = module_values(experiment, module, folder)
    asked = {"weights": weights, "start": start, "path": reference}
    try:
        _unsplit(assistant, experiment, {**asked, "directory": folder / "weights"})
        print(f", {experiment.plan.world_size} ranks", end="", flush=True)
        shared = {"weights": start, "reference": reference, "repeat": repeat, "found": found}
        lease.call("compare", experiment, shared)
        told = [json.loads(each.read_bytes()) for each in by_rank]
    finally:
        for each in (start, reference, *by_rank):
            each.unlink(missing_ok=True)
        print(flush=True)
    for of_rank in told:
        if of_rank["seen"] is not None:
            seen = Seen(**of_rank["seen"]).joined(seen)
    every = [[Difference(**one) for one in of_rank["differences"]] for of_rank in told]
    return merge(experiment, every, seen)


def _unsplit(assistant: Lease, experiment: Experiment, asked: Mapping[str, Any]) -> None:
    """Has the assistant write what the unsplit model computes."""
    product = "the unsplit model's results"
    try:
        assistant.call("unsplit_model", experiment, asked)
    except RankError as error:
        raise RunError(
            f"{product} could not be made: {error.kind}: {error.text}\n\n{error.remote_traceback}"
        ) from None
    except EngineDied as error:
        raise RunError(
            f"{product} could not be made, perhaps for want of memory: the process "
            f"that makes them {error.death}"
        ) from None


def merge(
    experiment: Experiment, found: Sequence[Iterable[Difference]], seen: Seen | None = None
) -> Verification:
    """One verification from what each rank found: for each tensor its worst rank.

    Args:
        seen: the range in which a loss of the user's own was tried.
    """
    worst: dict[tuple[str, str], Difference] = {}
    for difference in (difference for rank in found for difference in rank):
        key = difference.what, difference.name
        if key not in worst or difference.error > worst[key].error:
            worst[key] = difference
    plan: Plan = experiment.plan
    coverage = Coverage.of(plan.graph, worst.values())
    return Verification(
        model=plan.graph.source.name,
        precision=experiment.precision,
        steps=experiment.steps,
        differences=tuple(worst.values()),
        notes=(*_local(plan), *_missing(coverage), *_tried(experiment, seen)),
        coverage=coverage,
    )


def _tried(experiment: Experiment, seen: Seen | None) -> tuple[str, ...]:
    """In which range a loss of the user's own was tried."""
    if seen is None or not isinstance(experiment.loss, Loss):
        return ()
    name = experiment.loss.function
    rest = "" if seen.by_row else ": it gives one number for all rows, so beyond that nobody knows"
    return (f"loss {name} treated each row by itself for {seen}{rest}",)


def _missing(coverage: Coverage) -> tuple[str, ...]:
    """What was not compared, by name."""
    names = coverage.missing
    if not names:
        return ()
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"no output that was compared depends on, or no gradient reaches: "
        f"{', '.join(names[:_NAMED])}{more}",
    )


def _local(plan: Plan) -> tuple[str, ...]:
    norms = sum(layer.of_batch for layer in plan.graph.layers)
    if norms == 0 or plan.batch_norm != "local" or plan.world_size == 1:
        return ()
    return (
        f"batch norm is local in {norms} layers: the unsplit model normalized the same parts of "
        "the batch as the ranks do, and its running statistics moved by the mean over the parts, "
        "weighted by their rows; plan.with_batch_norm('synchronized') is exact without this",
    )
