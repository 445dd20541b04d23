"""The timing-model explorer: which step strategy is the fastest, and where that changes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import traitlets

from workbench.plan.codec import Codec
from workbench.plan.errors import ExperimentError, MachineError
from workbench.plan.experiment import Experiment
from workbench.plan.link import Link
from workbench.plan.machine import Machine
from workbench.predict.prediction import predict
from workbench.predict.timing import Coding, Compute, Network, TimingModel
from workbench.widgets.explorers import timing_picture
from workbench.widgets.explorers.controls import (
    Button,
    Choice,
    Control,
    Slider,
    decades,
    powers_of_two,
)
from workbench.widgets.explorers.explorer import Explorer
from workbench.widgets.explorers.picture import Picture
from workbench.widgets.explorers.reading import brief_seconds, rate
from workbench.widgets.explorers.timing_picture import HIGH, LOW
from workbench.widgets.units import size

CODECS: Mapping[str, str | None] = {
    "none": None,
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "int8",
    "int4": "int4",
    "top_k (1 %)": "top_k",
}
_BACKWARD = 2 / 3  # of compute, where nothing else is known: two products for each one forward


class TimingExplorer(Explorer):
    """Seconds of a step under every strategy, in closed form, by bandwidth and by world size.

    Args:
        machine: whose links are marked, and whose codecs' costs are used; None: codecs are free.
        experiment: whose gradient and, with a machine, predicted compute time it begins with.
        state: first values of the attributes.

    Attributes:
        world_size: workers that exchange gradients.
        bandwidth: of their network, in bytes/s one way.
        latency_s: of a message, in seconds.
        gradient_bytes: of fp32.
        compute_s: of forward and backward pass and update on one worker, in seconds.
        width: of the pipeline.
        codec: what gradients become under the strategies that take one: a name, or None.
        machine: as given.

    Raises:
        TypeError: a machine or experiment that is none.
        TraitError: a value that cannot be.
    """

    world_size = traitlets.Int(8)
    bandwidth = traitlets.Float(1.25e9)
    latency_s = traitlets.Float(20e-6)
    gradient_bytes = traitlets.Float(100e6)
    compute_s = traitlets.Float(0.1)
    width = traitlets.Int(2)
    codec = traitlets.Unicode("int8", allow_none=True)
    machine = traitlets.Instance(Machine, allow_none=True)

    def __init__(
        self, machine: Machine | None = None, experiment: Experiment | None = None, **state: Any
    ) -> None:
        if not isinstance(machine, Machine | None):
            raise TypeError(
                f"TimingExplorer takes a Machine or None, got {type(machine).__name__}; "
                "cluster.calibrate() measures one, wb.Machine.preset(name) has known ones"
            )
        known = {**({} if machine is None else _of_link(_network(machine)))}
        known |= {} if experiment is None else _of_experiment(experiment, machine)
        super().__init__(machine=machine, **{**known, **state})
        self.observe(self._moved, ["machine"])

    def controls(self) -> Sequence[Control]:
        """Seven sliders and choices, and a way back to the machine's values."""
        none = "" if self.machine is not None else "there is no machine: explorer.machine = machine"
        return (
            Slider("world_size", "workers", powers_of_two(1, 65536), lambda n: f"{n:,}"),
            Slider("bandwidth", "bandwidth", decades(LOW, HIGH), rate),
            Slider("latency_s", "latency", decades(1e-7, 1e-1), brief_seconds),
            Slider("gradient_bytes", "gradient", decades(1e3, 1e11), size),
            Slider("compute_s", "compute", decades(1e-4, 1e2), brief_seconds),
            Slider("width", "pipeline width", range(1, 9), str),
            Choice("codec", "codec", CODECS),
            Button("machine", "Take the machine's link", none),
        )

    def picture(self) -> Picture:
        """Two charts, and the strategies in figures."""
        try:
            return timing_picture.of(
                self.model(), self.width, self._codec, timing_picture.links(self.machine)
            )
        except (MachineError, ExperimentError) as error:
            raise ValueError(str(error)) from None

    def model(self) -> TimingModel:
        """The model at these values; `model().step_s(sync)` is what a curve shows."""
        network = Network(self.bandwidth, self.latency_s)
        return _model(self.machine, self.world_size, self.gradient_bytes, self.compute_s, network)

    def press(self, name: str) -> None:
        """Takes over the bandwidth and latency of the machine's link between workers."""
        if name != "machine":
            super().press(name)
        if self.machine is None:
            raise ValueError("there is no machine: explorer.machine = machine")
        with self.hold_trait_notifications():
            for field, value in _of_link(_network(self.machine)).items():
                setattr(self, field, value)

    @property
    def _codec(self) -> Codec | None:
        return None if self.codec is None else Codec.model_validate({"name": self.codec})

    @traitlets.validate("bandwidth", "latency_s", "gradient_bytes", "compute_s")
    def _is_positive(self, proposal: Mapping[str, Any]) -> float:
        value: float = proposal["value"]
        if not 0 < value < float("inf"):
            name = proposal["trait"].name
            raise traitlets.TraitError(f"{name} must be a positive number, got {value!r}")
        return value

    @traitlets.validate("world_size", "width")
    def _is_a_count(self, proposal: Mapping[str, Any]) -> int:
        value: int = proposal["value"]
        if value < 1:
            name = proposal["trait"].name
            raise traitlets.TraitError(f"{name} must be a positive integer, got {value!r}")
        return value

    @traitlets.validate("codec")
    def _is_known(self, proposal: Mapping[str, Any]) -> str | None:
        value: str | None = proposal["value"]
        if value not in CODECS.values():
            names = ", ".join(str(name) for name in CODECS.values())
            raise traitlets.TraitError(f"codec must be one of {names}, got {value!r}")
        return value


def model_of(machine: Machine, experiment: Experiment) -> TimingModel:
    """The model of an experiment on a machine: its network, and its predicted compute time.

    Raises:
        TypeError: an experiment that is none.
        MachineError: the machine has fewer devices than the experiment's plan has ranks.
    """
    known, link = _of_experiment(experiment, machine), _of_link(_network(machine))
    sizes = known["world_size"], known["gradient_bytes"], known["compute_s"]
    return _model(machine, *sizes, Network(link["bandwidth"], link["latency_s"]))


def _model(
    machine: Machine | None,
    world_size: int,
    gradient_bytes: float,
    compute_s: float,
    network: Network,
) -> TimingModel:
    costs = {} if machine is None else machine.devices[0].coding_s_per_byte
    if machine is not None:
        reduction = _network(machine).reduction_s_per_byte
        network = replace(network, reduction_s_per_byte=reduction)
    return TimingModel(
        workers=world_size,
        gradient_bytes=gradient_bytes,
        compute=Compute(0.0, (1 - _BACKWARD) * compute_s, _BACKWARD * compute_s),
        network=network,
        coding={name: Coding(both / 2, both / 2) for name, both in costs.items()},
    )


def _network(machine: Machine) -> Link:
    """Between workers that gradients travel between: of several hosts, the hosts'."""
    return machine.within if machine.across is None else machine.across


def _of_link(link: Link) -> dict[str, Any]:
    return {"bandwidth": link.bandwidth, "latency_s": max(link.latency_s, 1e-9)}


def _of_experiment(experiment: Experiment, machine: Machine | None) -> dict[str, Any]:
    if not isinstance(experiment, Experiment):
        raise TypeError(f"an experiment is a wb.Experiment, got {type(experiment).__name__}")
    plan = experiment.plan
    found: dict[str, Any] = {
        "world_size": plan.world_size,
        "gradient_bytes": 4.0 * sum(layer.parameters for layer in plan.graph.layers),
    }
    if machine is not None:
        schedule = predict(plan, machine, experiment).timeline
        found["compute_s"] = float(schedule.work.mean())
    return found
