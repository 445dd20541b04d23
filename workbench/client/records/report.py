"""A run as one page to send to somebody, and its metrics as files."""

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from workbench.client.records.curves import (
    figure_panels,
    loss_panel,
    memory_panel,
    speed_panel,
    time_panel,
)
from workbench.client.records.environment import Environment
from workbench.client.records.optional import require
from workbench.client.records.runs import fields_of, short
from workbench.client.run import view
from workbench.plan.display import svg
from workbench.plan.display.panels import document
from workbench.plan.graph.graph import shown
from workbench.plan.io.errors import ExperimentError, MachineError
from workbench.plan.io.files import write_whole
from workbench.plan.io.html import Markup, element, folded, joined, page, table
from workbench.plan.machine.machine import Machine
from workbench.predict.compare import Comparison
from workbench.predict.prediction import Prediction, predict
from workbench.store.errors import ClusterError

if TYPE_CHECKING:
    import pandas


class Reported(view.ShownRun, Protocol):
    """A run, as far as a page tells of it; see `Run`."""

    @property
    def metrics(self) -> "pandas.DataFrame":
        """One line for each step and rank."""

    @property
    def evaluations(self) -> "pandas.DataFrame":
        """One line for each evaluation."""

    @property
    def environment(self) -> Environment | None:
        """What it ran with."""

    @property
    def machine(self) -> Machine | None:
        """The machine that was calibrated for its hardware."""

    def compare(self, prediction: Prediction) -> Comparison:
        """Sets a prediction beside what was measured."""


def write_parquet(metrics: "pandas.DataFrame", path: Path) -> None:
    """Writes a table as a Parquet file.

    Raises:
        ModuleNotFoundError: pyarrow is not installed; the text says what to install.
    """
    require("pyarrow", "parquet", "a Parquet file")
    content = BytesIO()
    metrics.to_parquet(content, engine="pyarrow", index=False)
    write_whole(path, content.getvalue())


def report(run: Reported) -> str:
    """A whole page: how a run went, what ran, on what, and what was predicted."""
    plan = run.experiment.plan
    parts = [
        element("p", ", ".join(view.standing(run))),
        *([element("pre", str(run.error))] if run.error is not None else []),
        *_notes(run.notes),
        _curves(run),
        element("h2", "Configuration"),
        table(("field", "value"), _configuration(run)),
        folded("The plan, layer by layer", plan._repr_html_()),
        folded("As text, which wb.Experiment.load reads", element("pre", run.experiment.to_toml())),
        element("h2", "Environment"),
        _environment(run.environment),
        element("h2", "Predicted and measured"),
        _predicted(run),
    ]
    return page(f"{plan.graph.source.name}: {run.directory.name}", parts)


def _notes(notes: list[str]) -> list[Markup]:
    return [element("ul", *(element("li", note) for note in notes))] if notes else []


def _curves(run: Reported) -> Markup:
    try:
        drawn = curves_svg(run)
    except ClusterError as error:
        return element("p", str(error))
    return svg.image(drawn, f"Loss, metrics, speed, time and memory of {run.directory.name}")


def curves_svg(run: Reported) -> Markup:
    """Loss, metrics, speed, time and memory of a run, as a picture.

    Raises:
        ClusterError: no step was measured.
    """
    metrics = run.metrics
    if not len(metrics):
        raise ClusterError("No step was measured.")
    learned = {"loss": metrics}
    panels = [
        loss_panel(learned),
        *figure_panels({"test split": run.evaluations}),
        speed_panel(metrics),
        time_panel(metrics),
        memory_panel(metrics),
    ]
    return document(panels)


def _configuration(run: Reported) -> list[tuple[str, str]]:
    plan = run.experiment.plan
    fields = {
        "model": plan.graph.source.name,
        "parameters": f"{plan.graph.parameters:,}",
        "input": shown(plan.graph.inputs),
        "plan": short(plan),
        **fields_of(run.experiment),
    }
    return [(name, str(value)) for name, value in fields.items() if value is not None]


def _environment(environment: Environment | None) -> Markup:
    if environment is None:
        return element("p", "The run's folder does not say what it ran with.")
    parts = [environment._repr_html_()]
    if environment.module:
        module = element("pre", environment.module)
        parts.append(folded("The module, as it prints itself", module))
    for each in environment.sources:
        title = f"{each.name}, {each.place}" if each.place else each.name
        parts.append(folded(title, element("pre", each.text or "Its text could not be had.")))
    return joined(parts)


def _predicted(run: Reported) -> Markup:
    """The comparison; or why there is none."""
    try:
        if (machine := run.machine) is None:
            raise MachineError(
                "no machine was calibrated for the hardware that it ran on; "
                "cluster.calibrate(plan) does that, for the runs that follow"
            )
        prediction = predict(run.experiment.plan, machine, run.experiment)
        return run.compare(prediction)._repr_html_()
    except (MachineError, ExperimentError, ClusterError, ValueError) as error:
        return element("p", f"Nothing is set beside a prediction: {error}.")
