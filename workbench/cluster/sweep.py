"""One experiment with several values of its fields, and what came of each."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from workbench.cluster.run import Run
from workbench.plan.experiment import Experiment
from workbench.plan.plan import Plan

if TYPE_CHECKING:
    import pandas


class Sweep:
    """Runs that were submitted together.

    Args:
        tag: that their jobs carry.
        chosen: the values of each run, by name.
        runs: in the same order.
    """

    def __init__(self, tag: str, chosen: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> None:
        self.tag, self.chosen, self.runs = tag, tuple(chosen), tuple(runs)

    def wait(self, timeout: float | None = None) -> Self:
        """Returns when all have ended, in whatever way; an interrupt stops all of them.

        Raises:
            TimeoutError: one did not end in time, from when it was its turn to be waited for.
        """
        try:
            for run in self.runs:
                if not run.join(float("inf") if timeout is None else timeout):
                    raise TimeoutError(f"{run!r} goes on after {timeout:g} s")
        except KeyboardInterrupt:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Has all of them end after their current step."""
        for run in self.runs:
            run.stop()

    def table(self) -> "pandas.DataFrame":
        """One line for each run: its values, how far it is, and what it reached."""
        import pandas

        lines = []
        for values, run in zip(self.chosen, self.runs, strict=True):
            last = run.rows[-1] if run.rows else {}
            lines.append(
                {
                    "job": run.id,
                    **{name: _short(value) for name, value in values.items()},
                    "state": run.state,
                    "step": int(last["step"]) + 1 if last else 0,
                    "loss": last.get("loss"),
                    "samples_per_s": last.get("samples_per_s"),
                    "accuracy": run.evaluation.get("accuracy"),
                }
            )
        return pandas.DataFrame(lines)

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    def __repr__(self) -> str:
        done = sum(run.is_done for run in self.runs)
        return f"<Sweep {self.tag}: {done} of {len(self)} runs have ended>"

    def _repr_html_(self) -> str:
        return f"<div><p>{len(self)} runs</p>{self.table().to_html(index=False)}</div>"


def varied(experiment: Experiment, values: Mapping[str, Any]) -> Experiment:
    """The experiment with other values of its fields, or of its optimizer's.

    Raises:
        ValueError: a name that neither has.
        ExperimentError: values that cannot be.
    """
    own = {name: value for name, value in values.items() if name in type(experiment).model_fields}
    rest = {name: value for name, value in values.items() if name not in own}
    optimizer = own.pop("optimizer", experiment.optimizer)
    known = type(optimizer).model_fields
    if strangers := sorted(rest.keys() - known.keys()):
        raise ValueError(
            f"neither an experiment nor its {type(optimizer).__name__} has "
            f"{', '.join(strangers)}; there are "
            f"{', '.join(sorted({*type(experiment).model_fields, *known}))}"
        )
    if rest:
        optimizer = type(optimizer)(**{**optimizer.model_dump(), **rest})
    return experiment.replace(optimizer=optimizer, **own)


def _short(value: Any) -> Any:
    """What a table shows of a value."""
    if isinstance(value, Plan):
        cut = sorted({choice.group_size for choice in value.layers.values()} - {1})
        how = f"cut over {'/'.join(map(str, cut))}" if cut else "data parallel"
        return f"{how}, {value.world_size} ranks"
    return value if isinstance(value, (int, float, str, bool)) else str(value)
