"""The staleness and compression explorer: what late and coarse gradients cost, and buy."""

from collections.abc import Mapping, Sequence
from typing import Any

import traitlets

from workbench.plan.codec import Codec
from workbench.plan.errors import ExperimentError, MachineError
from workbench.plan.experiment import Experiment
from workbench.plan.machine import Machine
from workbench.predict.timing import Compute, Network, TimingModel
from workbench.widgets.explorers import staleness_picture
from workbench.widgets.explorers.controls import Choice, Control, Slider, decades
from workbench.widgets.explorers.descent import Descent
from workbench.widgets.explorers.explorer import Explorer
from workbench.widgets.explorers.picture import Picture
from workbench.widgets.explorers.problems import GOALS
from workbench.widgets.explorers.reading import times
from workbench.widgets.explorers.timing import model_of

_FRACTION = 0.1  # of values that "top_k" sends here, of gradients that are short
CODECS: Mapping[str, Codec | None] = {
    "none": None,
    "bf16": Codec(name="bf16"),
    "int8": Codec(name="int8"),
    "int4": Codec(name="int4"),
    "int4, error feedback": Codec(name="int4", error_feedback=True),
    "top_k, 10 %": Codec(name="top_k", fraction=_FRACTION),
    "top_k, 10 %, error feedback": Codec(name="top_k", fraction=_FRACTION, error_feedback=True),
}
USUAL = TimingModel(4, 100e6, Compute(0.0, 0.03, 0.06), Network(1.25e9, 50e-6))


class StalenessExplorer(Explorer):
    """Loss by step and by time, of steps whose gradients are late, coarse, both or neither.

    The loss is a quadratic one, or that of recognising real handwritten digits by softmax
    regression; of both, every step is computed, codec included. Whether steps are stable is exact
    on the first and a guide on the second. Times are those of a timing model.

    Args:
        model: of times; or a machine, preset or calibrated, whose network and compute times the
            experiment's gradients are to have; None: four workers, 100 MB of gradient and 90 ms of
            compute.
        experiment: with a machine: what is to be timed there.
        state: first values of the attributes.

    Attributes:
        loss: "quadratic" or "digits".
        width: of the pipeline.
        codec: a name in `CODECS`: "none", "int8", ...
        lr: learning rate times the largest curvature at the beginning.
        momentum: of SGD.
        condition: largest curvature over smallest, of the quadratic loss.
        r: communication of uncoded gradients over compute, which sets the model's bandwidth.
        model: of times, at this `r`.

    Raises:
        TypeError: a model that is none, or a machine without an experiment.
        TraitError: a value that cannot be.
    """

    loss = traitlets.Enum(tuple(GOALS), "quadratic")
    width = traitlets.Int(2, min=1, max=16)
    codec = traitlets.Enum(tuple(CODECS), "int8")
    lr = traitlets.Float(0.3)
    momentum = traitlets.Float(0.0)
    condition = traitlets.Float(20.0)
    r = traitlets.Float(1.0)

    def __init__(
        self,
        model: TimingModel | Machine | None = None,
        experiment: Experiment | None = None,
        **state: Any,
    ) -> None:
        if isinstance(model, Machine):
            if experiment is None:
                raise TypeError("with a machine, StalenessExplorer takes an experiment to time")
            model = model_of(model, experiment)
        if not isinstance(model, TimingModel | None):
            raise TypeError(
                "StalenessExplorer takes a wb.TimingModel, a wb.Machine with an experiment, or "
                f"None; got {type(model).__name__}"
            )
        self._model = USUAL if model is None else model
        if model is not None:
            state = {"r": model.r(), **state}
        super().__init__(**state)
        self.observe(self._moved, ["condition"])  # also where it is not shown at first

    @property
    def model(self) -> TimingModel:
        """The timing model, with the bandwidth at which communication over compute is `r`.

        Raises:
            MachineError: its latency alone takes longer.
        """
        return self._model.at(bandwidth=self._model.bandwidth_for(self.r))

    @property
    def run(self) -> Descent:
        """What is computed at these values."""
        steps = 400 if self.loss == "quadratic" else 240
        codec = CODECS[self.codec]
        rest = self.condition, self.loss, steps
        return Descent(self.lr, self.width, self.momentum, codec, *rest)

    def controls(self) -> Sequence[Control]:
        """What is late, what is lost, how steps are taken, and what travelling costs."""
        momenta = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
        known = decades(1.0, 1e4, 8)
        condition = Slider("condition", "condition number", known, lambda x: f"{x:,.0f}")
        return (
            Choice("loss", "loss", {name: name for name in GOALS}),
            Slider("width", "pipeline width", range(1, 9), str),
            Choice("codec", "codec", {name: name for name in CODECS}),
            Slider("lr", "lr × curvature", decades(1e-3, 4.0), lambda x: f"{x:.3g}"),
            Slider("momentum", "momentum", momenta, lambda x: f"{x:g}"),
            *([condition] if self.loss == "quadratic" else []),
            Slider("r", "communication / compute", decades(0.01, 100.0), times),
        )

    def picture(self) -> Picture:
        """Loss by step and by time, the limit of stability by width, and a table of widths."""
        try:
            return staleness_picture.of(self.run, self.codec, self.model)
        except (MachineError, ExperimentError) as error:
            raise ValueError(str(error)) from None

    @traitlets.validate("lr", "condition", "r")
    def _is_positive(self, proposal: Mapping[str, Any]) -> float:
        name, value = proposal["trait"].name, float(proposal["value"])
        least = 1.0 if name == "condition" else 0.0
        if not least <= value < float("inf") or value == 0:
            least_said = "1 or more" if least else "positive"
            raise traitlets.TraitError(f"{name} must be {least_said}, got {value!r}")
        return value

    @traitlets.validate("momentum")
    def _is_a_momentum(self, proposal: Mapping[str, Any]) -> float:
        value = float(proposal["value"])
        if not 0 <= value < 1:
            raise traitlets.TraitError(f"momentum must be in [0, 1), got {value!r}")
        return value
