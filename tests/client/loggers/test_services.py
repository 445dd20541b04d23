"""Services that keep runs, against recorders of the calls that their packages take."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

import workbench as wb
from workbench.client.loggers.feed import Feed
from workbench.client.loggers.logger import loggers


class Recorder:
    """Notes every call, by name; gives itself."""

    def __init__(self, **attributes):
        self.calls = []
        vars(self).update(attributes)

    def __getattr__(self, name):
        def call(*arguments, **keywords):
            self.calls.append((name, arguments, keywords))
            return self

        return call

    def of(self, name):
        return [(arguments, keywords) for each, arguments, keywords in self.calls if each == name]


@pytest.fixture
def package(monkeypatch):
    """`package("wandb", init=...)`: a package of that name that has these."""

    def package(name, **attributes):
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)

    monkeypatch.setattr("workbench.client.records.optional.find_spec", lambda _name: True)
    return package


def go(played, logger, state="finished"):
    played.subscribe(Feed(played, loggers(logger)))
    played.step(0, loss=2.0)
    played.step(1, loss=1.0)
    played.end(state, accuracy=0.75)
    assert played.notes == []


@pytest.mark.parametrize(("state", "status"), [("finished", 0), ("failed", 1)])
def test_weights_and_biases(played, package, state, status):
    summary = {}
    run, opened = Recorder(summary=summary), Recorder()
    package("wandb", init=lambda **keywords: opened.init(**keywords) and run)
    go(played, wb.WandB("mine", offline=True, settings={"tags": ["a"]}), state)
    ((_, keywords),) = opened.of("init")
    assert (keywords["project"], keywords["mode"], keywords["tags"]) == ("mine", "offline", ["a"])
    assert keywords["name"] == played.directory.name
    assert keywords["id"].startswith(played.directory.name + "-")
    assert keywords["config"]["optimizer"] == played.experiment.optimizer.kind
    assert [step["loss"] for (step,), _ in run.of("log")] == [2.0, 1.0]
    assert [step["step"] for (step,), _ in run.of("log")] == [0, 1]
    assert summary == {"state": state, "test_accuracy": 0.75}
    assert run.of("finish") == [((), {"exit_code": status})]


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("state", "status"), [("finished", "FINISHED"), ("stopped", "KILLED")])
def test_mlflow(played, package, is_known, state, status):
    client = Recorder(
        get_experiment_by_name=lambda _name: (
            SimpleNamespace(experiment_id="5") if is_known else None
        ),
        info=SimpleNamespace(run_id="r1"),
    )
    package("mlflow", MlflowClient=lambda tracking_uri: client)
    package("mlflow.entities", Param=lambda *given: given, Metric=lambda *given: given)
    go(played, wb.MLflow("mine", uri="sqlite:///x"), state)
    assert len(client.of("create_experiment")) == (not is_known)
    ((_, first), *others) = client.of("log_batch")
    assert ("model", "Toy") in first["params"]
    metrics = [metric for _, keywords in others for metric in keywords["metrics"]]
    losses = [(value, step) for name, value, _, step in metrics if name == "loss"]
    assert losses == [(2.0, 0), (1.0, 1)]
    assert metrics[-1][:2] == ("test_accuracy", 0.75)
    assert client.of("set_terminated") == [(("r1",), {"status": status})]


def test_trackio(played, package):
    run, opened = Recorder(), Recorder()
    package("trackio", init=lambda **keywords: opened.init(**keywords) and run)
    go(played, wb.Trackio("mine", name="first", settings={"space_id": "a/b"}))
    ((_, keywords),) = opened.of("init")
    assert (keywords["project"], keywords["name"], keywords["space_id"]) == ("mine", "first", "a/b")
    assert [(row["loss"], how["step"]) for (row,), how in run.of("log")[:2]] == [(2.0, 0), (1.0, 1)]
    assert run.of("log")[-1] == (({"test_accuracy": 0.75},), {"step": 1})
    assert {"step", "time"}.isdisjoint(run.of("log")[0][0][0])
    assert len(run.of("finish")) == 1


def test_opentelemetry(played, package):
    meter, provider = Recorder(), Recorder()
    provider.get_meter = lambda name: meter
    package("opentelemetry", metrics=SimpleNamespace(get_meter_provider=lambda: provider))
    go(played, wb.OpenTelemetry())
    units = {name: how["unit"] for (name,), how in meter.of("create_gauge")}
    assert units["workbench.loss"] == "1"
    assert units["workbench.wait_s"] == "s"
    assert units["workbench.samples_per_s"] == "1/s"
    assert units["workbench.peak_bytes"] == "By"
    assert units["workbench.test_accuracy"] == "1"
    assert len(units) == len(meter.of("create_gauge"))  # one for each, whatever the steps
    assert {tuple(given[1].items()) for given, _ in meter.of("set")} == {
        (("run", played.directory.name),)
    }
    assert [given[0] for given, _ in meter.of("set")][-1] == 0.75
    assert provider.of("shutdown") == []  # it is not the run's


def test_opentelemetry_sends_to_an_endpoint_until_the_end(played, package):
    exported, provider = [], Recorder()
    package("opentelemetry", metrics=None)
    sdk, export = "opentelemetry.sdk.metrics", "opentelemetry.exporter.otlp.proto.http"
    package(sdk, MeterProvider=lambda readers: exported.extend(readers) or provider)
    package(f"{sdk}.export", PeriodicExportingMetricReader=lambda e, **how: (e, how))
    package(f"{export}.metric_exporter", OTLPMetricExporter=lambda endpoint: endpoint)
    go(played, wb.OpenTelemetry("http://host:4318/v1/metrics", every_s=2.0))
    assert exported == [("http://host:4318/v1/metrics", {"export_interval_millis": 2000.0})]
    assert len(provider.of("shutdown")) == 1
