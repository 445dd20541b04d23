"""The communication matrix: who sends how much to whom in a step, predicted and recorded."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import traitlets

from workbench.plan.errors import ExperimentError
from workbench.predict.prediction import Prediction, predict
from workbench.predict.traffic.pairs import Pairs, pairs_of
from workbench.widgets.explorers import traffic_picture
from workbench.widgets.explorers.controls import Choice, Control
from workbench.widgets.explorers.explorer import Explorer
from workbench.widgets.explorers.picture import Picture
from workbench.widgets.explorers.recorded_traffic import recorded
from workbench.widgets.explorers.traffic_picture import ALL, Record


class TrafficMatrix(Explorer):
    """Bytes of a step from every rank to every other, exact, of all collectives or of some.

    With a run, what its ranks recorded stands beside what is predicted, once it has ended.

    Args:
        prediction: whose traffic; or a run, of whose experiment it is predicted, as it is now.
        state: first values of the attributes.

    Attributes:
        prediction: as given; another one may be assigned, and is then shown alone.
        run: whose record is shown, or None.
        op: "all", or one collective: "all_gather", "all_reduce", ...
        phase: "all", "forward", "backward" or "step".
        layer: "all", or one layer, "gradients", "parameters", ...

    Raises:
        TypeError: neither a prediction nor a run.
        TraitError: a value that cannot be.
    """

    prediction = traitlets.Instance(Prediction)
    op = traitlets.Unicode(ALL)
    phase = traitlets.Unicode(ALL)
    layer = traitlets.Unicode(ALL)

    _leave: Callable[[], None] | None = None

    def __init__(self, prediction: Any, **state: Any) -> None:
        self._known: tuple[Prediction | None, tuple[Pairs, ...]] = (None, ())
        self.run = None if isinstance(prediction, Prediction) else prediction
        super().__init__(prediction=of_run(prediction), **state)
        self.observe(self._another, ["prediction"])
        if self.run is not None:
            self._leave = self.run.subscribe(self._went_on)

    @property
    def pairs(self) -> tuple[Pairs, ...]:
        """Of every collective.

        Raises:
            ExperimentError: more ranks than there are pairs counted for.
        """
        known, pairs = self._known
        if known is not self.prediction:
            pairs = pairs_of(self.prediction.program)
            self._known = self.prediction, pairs
        return pairs

    def controls(self) -> Sequence[Control]:
        """Which of the collectives are shown."""
        try:
            pairs = self.pairs
        except ExperimentError:
            return ()
        return tuple(
            Choice(name, label, {ALL: ALL, **{each: each for each in _values(pairs, name)}})
            for name, label in (("op", "collective"), ("phase", "phase"), ("layer", "layer"))
        )

    def picture(self) -> Picture:
        """The matrix, and its sums by rank."""
        try:
            pairs = self.pairs
        except ExperimentError as error:
            raise ValueError(str(error)) from None
        wanted = {"op": self.op, "phase": self.phase, "layer": self.layer}
        shown = [
            one
            for one in pairs
            if all(value in (ALL, getattr(one, name)) for name, value in wanted.items())
        ]
        plan = self.prediction.experiment.plan
        world = plan.world_size
        return traffic_picture.of(plan.graph.source.name, world, shown, wanted, self._record(world))

    def close(self) -> None:
        """Ends the view; its values stay readable."""
        if self._leave is not None:
            self._leave()
            self._leave = None
        super().close()

    def _record(self, world: int) -> Record | str:
        """What was recorded of what is chosen, or why there is nothing; "" without a run."""
        if self.run is None:
            return ""
        if self.layer != ALL:
            return "Ranks record by collective and phase; of one layer, the traffic is predicted."
        found = recorded(self.run)
        if found is None:
            return "What the run's ranks record shows here once it has ended."
        if found.world != world:
            return f"The run ended on {found.world} ranks; what these recorded is not compared."
        op, phase = (None if value == ALL else value for value in (self.op, self.phase))
        return Record(found.table(op, phase), found.steps)

    def _went_on(self, rows: Sequence[Any]) -> None:
        if not rows:  # its state has changed
            self._moved({})

    def _another(self, change: Mapping[str, Any]) -> None:
        with self._guard:
            self.run = None
            for name in ("op", "phase", "layer"):
                setattr(self, name, ALL)
            self._moved(change)

    @traitlets.validate("op", "phase", "layer")
    def _is_known(self, proposal: Mapping[str, Any]) -> str:
        name, value = proposal["trait"].name, proposal["value"]
        if value != ALL and value not in (known := _values(self.pairs, name)):
            raise traitlets.TraitError(f"{name} is {ALL}, {', '.join(known)}; got {value!r}")
        return str(value)


def of_run(wanted: Any) -> Prediction:
    """A prediction as it is; of a run, its experiment's; raises TypeError for anything else."""
    if isinstance(wanted, Prediction):
        return wanted
    experiment = getattr(wanted, "experiment", None)
    if experiment is None:
        raise TypeError(
            f"TrafficMatrix takes a Prediction or a Run, got {type(wanted).__name__}; "
            "wb.predict(plan, machine, experiment) makes the first"
        )
    return predict(experiment.plan, None, experiment)


def _values(pairs: Sequence[Pairs], name: str) -> list[str]:
    return list(dict.fromkeys(getattr(one, name) for one in pairs))
