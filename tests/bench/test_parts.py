"""What benchmarks make of what they have measured, without running anything for long."""

import sys
from types import SimpleNamespace

import pytest
from torch import nn

from workbench.bench import exactness, splitbrain, widgets
from workbench.bench.__main__ import main
from workbench.bench.harness.match import Match, Measured
from workbench.bench.harness.nets import GPT, INPUT_SHAPE, CifarNet, SmallVGG
from workbench.bench.harness.progress import Progress
from workbench.bench.harness.report import Devices, Figure, engines_here
from workbench.bench.lm import QUICK
from workbench.bench.pipesgd import Learnt
from workbench.bench.predict import cases, predict
from workbench.bench.recovery import BLOCK, Target, costs_in
from workbench.bench.splitbrain import GROUP_SIZES, savings
from workbench.model.tracing.trace import trace
from workbench.plan.plans.plan import Plan
from workbench.store.record import AttemptRecord
from workbench.train.verify.verification import Difference, Verification


def test_the_small_vgg_is_the_reference_s():
    graph = trace(SmallVGG(), input_shape=INPUT_SHAPE)
    linear = sum(layer.parameters for layer in graph.layers if layer.kind == "linear")
    assert (graph.parameters, linear) == (7_580_746, 5_255_178)


def test_the_cifar_net_is_that_of_the_paper():
    """Sec. 1.1: 4.12 M parameters in convolutions, 0.49 M in linear layers; 184.1 M MACs."""
    graph = trace(CifarNet(), input_shape=(3, 32, 32))
    convolutions = [layer for layer in graph.layers if layer.kind == "conv2d"]
    held = sum(layer.parameters for layer in convolutions)
    assert held == pytest.approx(4.12e6, rel=0.01)
    assert graph.parameters - held == pytest.approx(0.49e6, rel=0.02)
    assert sum(layer.flops for layer in convolutions) / 2 == pytest.approx(184.1e6, rel=0.001)


def test_all_of_a_block_is_sharded_and_nothing_gathered_inside():
    module = GPT(1, QUICK.width, QUICK.tokens, QUICK.vocabulary)
    graph = trace(module, input_shape=(QUICK.tokens,), vocabulary=QUICK.vocabulary)
    plan = Plan.hybrid(graph, 2)
    schemes = {name.rpartition(".")[2]: one.scheme for name, one in plan.layers.items()}
    assert {schemes[name] for name in ("q", "k", "v", "up", "head")} == {"shard_out"}
    assert {schemes[name] for name in ("o", "down")} == {"shard_in"}
    between = [steps for (name, _), steps in plan.flow.edges.items() if name in plan.flow.ways]
    assert not any(between)


@pytest.mark.parametrize(
    ("cores", "engines", "grid", "crowded"),
    [(1, 2, 3 * 3, True), (2, 2, 3 * 3, True), (4, 4, 3 * 6, False), (64, 8, 3 * 6, False)],
)
def test_engines_follow_from_the_cores(monkeypatch, cores, engines, grid, crowded):
    """More engines than cores are a part of their own."""
    monkeypatch.setattr(Devices, "here", lambda: Devices(cores, "cores"))
    monkeypatch.setattr(splitbrain, "zero_is_installed", lambda: False)
    matches = {match.part: match.engines for match in splitbrain._matches(engines_here(), False)}
    headline = dict.fromkeys(("ddp", "fsdp", "independent"), engines)
    assert matches == headline | ({"oversubscribed": 4} if crowded else {})
    assert len(splitbrain._grid()) == grid


def measured(system, seconds):
    samples, one = {"workbench": 64, system: 64}, {"workbench": 1.0, system: seconds}
    taken = {name: [s] for name, s in one.items()}
    return Measured(samples, taken, {"workbench": 1, system: 2}, {}, ["ddp 25"])


def test_oversubscribed_figures_are_no_headline(monkeypatch):
    monkeypatch.setattr(Devices, "here", lambda: Devices(2, "cores"))
    graph = trace(SmallVGG(width=8), input_shape=INPUT_SHAPE)
    growing = splitbrain._Growing(graph, splitbrain.QUICK, 2)
    for part, engines, seconds in (("ddp", 2, 2.0), ("oversubscribed", 4, 3.0)):
        results = growing.match(Match(part, engines, (), 1.0))
        results.add([measured("torch DDP, 25 MiB", seconds)])
        results.add([measured("torch DDP, 25 MiB", seconds + 1)])
    report = growing.so_far()
    assert report.figures["throughput_vs_ddp"] == Figure(2.5, 2.0, 3.0)
    assert report.figures["throughput_vs_best_peer"] == Figure(2.5, 2.0, 3.0)
    assert report.figures["throughput_vs_ddp_oversubscribed"] == Figure(3.5, 3.0, 4.0)
    assert "oversubscribed: 4 engines on 2 cores; no headline." in report.notes


# In percent, for groups of 2, 4, 8, 16 and 32: P_FC / P (1 - 1/k), from layer sizes by hand.
SMALL = {
    ("small VGG", "all"): (34.7, 52.0, 60.7, 65.0, 67.2),
    ("small VGG", "all but the last"): (34.6, 51.9, 60.5, 64.9, 67.0),
}
OTHERS = {
    ("small VGG, half width", "all"): (34.7, 52.0, 60.7, 65.0, 67.2),
    ("VGG-11, head of 4096", "all"): (33.6, 50.4, 58.8, 63.0, 65.1),
    ("VGG-11, head of 512", "all"): (2.7, 4.1, 4.8, 5.1, 5.3),
    ("vgg11, 1000 classes", "all"): (46.5, 69.8, 81.4, 87.2, 90.2),
    ("vgg11, 10 classes", "all"): (46.4, 69.6, 81.2, 87.0, 89.9),
    ("vgg16, 1000 classes", "all"): (44.7, 67.0, 78.2, 83.8, 86.6),
    ("vgg16, 10 classes", "all"): (44.5, 66.8, 77.9, 83.5, 86.3),
}


@pytest.mark.parametrize(("quick", "expected"), [(True, SMALL), (False, SMALL | OTHERS)])
def test_savings_are_those_of_the_formula(quick, expected):
    rows = savings(quick=quick)
    found = {(row["model"], row["linear layers cut"], row["group"]): row["saved %"] for row in rows}
    table = {
        (*key, k): percent
        for key, values in expected.items()
        for k, percent in zip(GROUP_SIZES, values, strict=True)
    }
    assert found == pytest.approx(table, abs=0.1)
    saved = splitbrain.saved_figures(rows)["parameters_saved_k4"]
    assert saved.median == pytest.approx(52.0, abs=0.1)


def test_errors_that_no_split_can_avoid_are_separate():
    def found(precision, error, rounding):
        return Verification("m", precision, 1, (Difference("output", "a", 0, error, rounding),))

    fine, odd = found("fp32", 2e-6, 1e-6), found("fp32", 8e-2, 1e-1)
    assert exactness.figures_of([fine, odd], "fp32") == {
        "worst_fp32": Figure.of([2e-6]),
        "beyond_fp32": Figure.of([8e-2]),
        "rounding_fp32": Figure.of([1e-1]),
    }
    assert exactness.figures_of([fine, found("fp64", 1e-12, 0.0)], "fp64") == {
        "worst_fp64": Figure.of([1e-12])
    }


def test_drawn_cases_need_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(exactness, "__file__", str(tmp_path / "workbench/bench/exactness.py"))
    with pytest.raises(SystemExit, match="needs the generator in tests/oracle"):
        main(["exactness", "--random", "3"])


@pytest.mark.slow
def test_drawn_cases_are_judged_in_a_process_of_their_own():
    said = Progress(say=lambda line: None)
    reports = list(exactness.run(said, quick=False, random=2, seed=31337))
    assert len(reports) == 2  # of both cases, and once more with failures made small
    rows = {row["verdict"]: row["cases"] for row in reports[-1].rows}
    assert sum(rows.values()) == reports[-1].figures["random_cases"].median == 2
    assert rows["wrong"] == 0, reports[-1].notes


def test_seconds_to_an_accuracy():
    learnt = Learnt(((1.0, 0.5), (2.0, 0.9), (3.0, 0.8)))
    assert learnt.accuracy == 0.8
    assert [learnt.seconds_to(goal) for goal in (0.4, 0.9, 0.95)] == [1.0, 2.0, float("inf")]
    assert Learnt(()).accuracy == 0.0


def test_parts_that_are_not_there_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["predict", "--quick", "--only", "time"])
    assert "--only: there is no part 'time': memory, times, speed" in capsys.readouterr().err


def attempt(number, reason, *, is_lost=True):
    return AttemptRecord(number, (0, 1), 0.0, 1.0, reason=reason, is_lost=is_lost)


def test_an_attempt_more_is_counted_unless_an_engine_was_killed_before_it():
    target = Target(None, None, None, killed={17})
    died = attempt(1, "rank 1 (pid 17) died: its process was ended by SIGKILL")
    others = (
        attempt(1, "rank 1 (pid 171) died: its process was ended by SIGKILL"),
        attempt(1, "rank 0 failed: PeerLost: rank 1 is gone"),
        attempt(1, "rank 1 (pid 17) was interrupted", is_lost=False),
    )
    assert target.was_killed(died)
    assert not any(target.was_killed(other) for other in others)


def test_the_cost_of_checkpoints_is_told_by_steps_with_and_without_in_turns():
    took = [9.0] * 2 * BLOCK + ([1.5] + [1.0] * (BLOCK - 1) + [1.0] * BLOCK) * 3
    rows = [
        {"step": step, "rank": rank, "time": sum(took[: step + 1])}
        for step in range(len(took))
        for rank in (0, 1)
    ]
    assert costs_in(rows) == pytest.approx([0.5 / BLOCK] * 3)


def test_without_a_browser_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(widgets, "chromium", lambda: None)
    with pytest.raises(RuntimeError, match="install chromium"):
        next(widgets.run(Progress(), quick=True))


class Language(nn.Module):
    """Token ids in, scores out."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, ids):
        return {"logits": self.head(self.table(ids))}


@pytest.fixture
def transformers(monkeypatch):
    """An object that answers as the package does."""

    class Config(SimpleNamespace):
        pass

    def for_model(kind, num_labels=None, experts_implementation=None, **fields):
        return Config(**{"vocab_size": 50_000, "hidden_size": 768, "use_cache": True} | fields)

    library = SimpleNamespace(
        AutoConfig=SimpleNamespace(for_model=for_model),
        AutoModelForCausalLM=SimpleNamespace(
            _model_mapping={Config: Language}, from_config=lambda config: Language(config)
        ),
        models=SimpleNamespace(
            auto=SimpleNamespace(
                configuration_auto=SimpleNamespace(CONFIG_MAPPING_NAMES={"small": None})
            )
        ),
    )
    monkeypatch.setitem(sys.modules, "transformers", library)
    return library


def test_a_language_model_is_built_as_wide_as_it_is_asked_for(transformers):
    for wider in (1, 8):
        graph = trace(**cases.small_language_model(transformers, "small", wider))
        assert graph.parameters == wider * 64 + 2 * 32 * 64 * wider**2
    plans = [case.experiment.plan for case in cases.of_package(transformers, "small")]
    assert [plan.world_size for plan in plans] == [2, 2]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(predict, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'parallel-workbench\[models\]'"):
        next(predict.run(Progress(only="packages"), quick=False))
