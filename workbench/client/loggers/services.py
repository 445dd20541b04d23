"""Loggers of packages that keep many people's runs: Weights & Biases, MLflow, Trackio.

Each is told of its run by name and configuration, gets every step, and how the run ended. None of
their global "current run" is used, so that runs that go on at the same time stay apart.
"""

import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.client.loggers.logger import Log, LoggedRun
from workbench.client.records.optional import require
from workbench.plan.experiment.metrics import Row

_LONGEST_PARAMETER = 500  # characters, as MLflow takes them


@dataclass(frozen=True)
class WandB:
    """A run of Weights & Biases, beside whose steps stands the whole configuration.

    It runs in the process that holds the run: where a notebook closes, the run goes on, and its
    steps are missing there. `cluster.jobs[id].log_to(...)`, or `wb.Run.load(folder).log_to(...)`
    later, sends all of them. A run that is resumed goes on under the same name and id.

    Attributes:
        project: the project's name.
        name: the run's name there; None: that of its folder.
        offline: whether to write to the run's folder alone; `wandb sync` sends that later.
        settings: further arguments of `wandb.init`, such as `entity` or `tags`.
    """

    project: str = "parallel-workbench"
    name: str | None = None
    offline: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def require(self) -> None:
        """Checks that wandb is installed.

        Raises:
            ModuleNotFoundError: it is not; the text says what to install.
        """
        require("wandb", "wandb", "wb.WandB")

    def open(self, run: LoggedRun) -> Log:
        """Begins a run there, or goes on with it."""
        import wandb

        opened = wandb.init(
            project=self.project,
            name=self.name or run.name,
            id=f"{run.name}-{zlib.crc32(str(run.directory).encode()):08x}",
            config=dict(run.configuration),
            dir=str(run.directory),
            mode="offline" if self.offline else "online",
            reinit="create_new",  # other runs go on meanwhile
            resume="allow",
            **self.settings,
        )
        # A step that is run again after a fault comes again: wandb's own count of steps would
        # refuse it.
        opened.define_metric("step")
        opened.define_metric("*", step_metric="step")
        return _WandBRun(opened)


class _WandBRun:
    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, step: Row) -> None:
        self._run.log(step)

    def close(self, state: str, evaluation: Mapping[str, float]) -> None:
        self._run.summary.update({"state": state, **_of_test(evaluation)})
        self._run.finish(exit_code=1 if state == "failed" else 0)


@dataclass(frozen=True)
class MLflow:
    """A run of MLflow: its configuration as parameters, its steps as metrics.

    It runs in the process that holds the run; see `WandB`. A run that is resumed is another one
    there.

    Attributes:
        experiment: the name of MLflow's experiment, which is made where it is missing.
        uri: the tracking server, or a database ("sqlite:///mlflow.db"); None: MLflow's own choice.
        name: the run's name there; None: that of its folder.
    """

    experiment: str = "parallel-workbench"
    uri: str | None = None
    name: str | None = None

    def require(self) -> None:
        """Checks that mlflow is installed.

        Raises:
            ModuleNotFoundError: it is not; the text says what to install.
        """
        require("mlflow", "mlflow", "wb.MLflow")

    def open(self, run: LoggedRun) -> Log:
        """Begins a run there."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(tracking_uri=self.uri)
        known = client.get_experiment_by_name(self.experiment)
        number = known.experiment_id if known else client.create_experiment(self.experiment)
        opened = client.create_run(number, run_name=self.name or run.name).info.run_id
        known_by = run.configuration.items()
        parameters = [Param(name, str(value)[:_LONGEST_PARAMETER]) for name, value in known_by]
        client.log_batch(opened, params=parameters)
        return _MLflowRun(client, opened)


class _MLflowRun:
    def __init__(self, client: Any, run: str) -> None:
        self._client, self._run, self._last = client, run, 0

    def write(self, step: Row) -> None:
        self._last = int(step["step"])
        values = {name: v for name, v in step.items() if name not in ("step", "time")}
        self._send(values, step["time"])

    def close(self, state: str, evaluation: Mapping[str, float]) -> None:
        self._send(_of_test(evaluation), time.time())
        ended = {"finished": "FINISHED", "failed": "FAILED"}.get(state, "KILLED")
        self._client.set_terminated(self._run, status=ended)

    def _send(self, values: Mapping[str, float], at: float) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(name, v, int(1000 * at), self._last) for name, v in values.items()]
        self._client.log_batch(self._run, metrics=metrics)


@dataclass(frozen=True)
class Trackio:
    """A run of Trackio, in its database on this computer; `trackio show` displays it.

    It runs in the process that holds the run; see `WandB`.

    Attributes:
        project: the project's name.
        name: the run's name there; None: that of its folder.
        settings: further arguments of `trackio.init`, such as `space_id`.
    """

    project: str = "parallel-workbench"
    name: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def require(self) -> None:
        """Checks that trackio is installed.

        Raises:
            ModuleNotFoundError: it is not; the text says what to install.
        """
        require("trackio", "trackio", "wb.Trackio")

    def open(self, run: LoggedRun) -> Log:
        """Begins a run there, or goes on with it."""
        import trackio

        # Without the dashboard in a notebook's cell: it is opened on a thread here.
        how = {"resume": "allow", "embed": False, **self.settings}
        name, configuration = self.name or run.name, dict(run.configuration)
        return _TrackioRun(
            trackio.init(project=self.project, name=name, config=configuration, **how)
        )


class _TrackioRun:
    def __init__(self, run: Any) -> None:
        self._run, self._last = run, 0

    def write(self, step: Row) -> None:
        self._last = int(step["step"])
        values = {name: v for name, v in step.items() if name not in ("step", "time")}
        self._run.log(values, step=self._last)

    def close(self, state: str, evaluation: Mapping[str, float]) -> None:
        if evaluation:
            self._run.log(_of_test(evaluation), step=self._last)
        self._run.finish()


def _of_test(evaluation: Mapping[str, float]) -> dict[str, float]:
    return {f"test_{name}": value for name, value in evaluation.items()}
