"""A logger of OpenTelemetry: figures of runs beside those of whatever else is watched."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.client.loggers.logger import Log, LoggedRun
from workbench.client.records.optional import require
from workbench.plan.experiment.metrics import Row

_UNITS = {"_per_s": "1/s", "_s": "s", "_bytes": "By"}
"""The unit of a column by how its name ends, as the standard writes units (UCUM)."""


@dataclass(frozen=True)
class OpenTelemetry:
    """Gauges `workbench.loss`, `workbench.samples_per_s`, ..., one for each column of a step.

    Each has the attribute `run`, the name of the run's folder. Seconds are `s`, bytes `By`. They
    are sent by the process that holds the run; see `WandB`.

    Attributes:
        endpoint: the address at which a collector takes OTLP over HTTP,
            "http://host:4318/v1/metrics"; None: the meter provider of this process gets them, which
            your own code or OpenTelemetry's environment variables set up.
        every_s: seconds between two exports to the endpoint.
    """

    endpoint: str | None = None
    every_s: float = 10.0

    def require(self) -> None:
        """Checks that OpenTelemetry is installed, and what exports to an endpoint.

        Raises:
            ModuleNotFoundError: it is not; the text says what to install.
        """
        require("opentelemetry", "opentelemetry", "wb.OpenTelemetry")

    def open(self, run: LoggedRun) -> Log:
        """Makes the run's gauges, when its first step comes."""
        from opentelemetry import metrics

        provider: Any = metrics.get_meter_provider() if self.endpoint is None else self._own()
        owned = None if self.endpoint is None else provider
        return _Gauges(provider.get_meter("workbench"), run.name, owned)

    def _own(self) -> Any:
        """A meter provider that exports to the endpoint."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        exporter = OTLPMetricExporter(endpoint=self.endpoint)
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=1000 * self.every_s)
        return MeterProvider([reader])


class _Gauges:
    """The gauges of one run.

    Args:
        meter: what makes them.
        run: the run's name.
        owned: the meter provider, where it ends with the run.
    """

    def __init__(self, meter: Any, run: str, owned: Any) -> None:
        self._meter, self._run, self._owned = meter, run, owned
        self._gauges: dict[str, Any] = {}

    def write(self, step: Row) -> None:
        for name, value in step.items():
            if name != "time":
                self._set(name, value)

    def close(self, state: str, evaluation: Mapping[str, float]) -> None:
        for name, value in evaluation.items():
            self._set(f"test_{name}", value)
        if self._owned is not None:
            self._owned.shutdown()  # which sends what is left

    def _set(self, name: str, value: float) -> None:
        if name not in self._gauges:
            unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "1")
            self._gauges[name] = self._meter.create_gauge(f"workbench.{name}", unit=unit)
        self._gauges[name].set(value, {"run": self._run})
