"""What `Cluster.verify` runs, and how the ranks' findings become one."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import cloudpickle  # type: ignore[import-untyped]
from torch import nn

from workbench.client.assistant import Assistant
from workbench.client.leases import Dispatch
from workbench.plan.experiment import SGD, Adam, AdamW, Experiment, Synthetic
from workbench.plan.plan import Plan
from workbench.store import message
from workbench.train.loop.objective import RowLoss
from workbench.train.verify.verification import TOLERANCE, Coverage, Difference, Verification

# Large steps would show how fast two trajectories of rounding part, in fp32 by ReLUs that flip,
# and not whether a split computes the same.
GENTLE = SGD(lr=1e-3, momentum=0.9)
_NAMED = 5  # of what was not compared, in a note


def experiment_for(
    plan: Plan,
    *,
    batch_size: int | None,
    steps: int,
    precision: Literal["fp64", "fp32"],
    optimizer: SGD | Adam | AdamW | None,
    data: Any,
    seed: int,
) -> Experiment:
    """The experiment to run split and unsplit.

    Raises:
        ValueError: a precision in which rounding would hide errors.
    """
    if precision not in TOLERANCE:
        valid = " or ".join(map(repr, TOLERANCE))
        raise ValueError(f"verify computes in {valid}, got {precision!r}")
    size = 4 * plan.world_size if batch_size is None else batch_size
    classes = max(2, plan.graph.num_classes)
    return Experiment(
        plan=plan,
        data=Synthetic(samples=max(1, size * steps), classes=classes) if data is None else data,
        batch_size=size,
        optimizer=GENTLE if optimizer is None else optimizer,
        steps=steps,
        precision=precision,
        seed=seed,
    )


def carry_out(
    experiment: Experiment,
    module: nn.Module | None,
    places: Sequence[int],
    assistant: Assistant,
    dispatch: Dispatch,
    *,
    loss: RowLoss | None = None,
    repeat: bool = True,
) -> Verification:
    """Lets the assistant compute the unsplit model, then the ranks compare theirs; says so.

    Args:
        experiment: made by `experiment_for`.
        module: the user's own, where the model was traced from one.
        places: the engine of each rank, taken for this.
        assistant: makes what the ranks compare with.
        dispatch: starts the ranks.
        loss: the user's own; None: cross-entropy.
        repeat: whether the ranks run twice.

    Raises:
        ModelError: `module` is missing, or is another one than was traced.
        RunError: a rank failed.
    """
    packed = message.pack(experiment)
    print(f"verifying {experiment.plan.graph.source.name}: initial weights", end="", flush=True)
    weights = assistant.values_of(experiment, module) or assistant.weights(packed)
    print(", unsplit model", end="", flush=True)
    function = None if loss is None else cloudpickle.dumps(loss)
    start, reference = assistant.reference(packed, weights, function)
    try:
        print(f", {experiment.plan.world_size} ranks", end="", flush=True)
        shared = {"weights": start, "reference": reference, "loss": function, "repeat": repeat}
        found = dispatch.called("workbench.train.verify.verify:compare", packed, places, shared)
    finally:
        start.unlink(missing_ok=True)
        reference.unlink(missing_ok=True)
        print(flush=True)
    return merge(experiment, found)


def merge(experiment: Experiment, found: Sequence[Iterable[Difference]]) -> Verification:
    """One verification from what each rank found: for each tensor its worst rank."""
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
        notes=(*_local(plan), *_missing(coverage)),
        coverage=coverage,
    )


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
