"""fp16 and its loss scale as values: what is valid, and what is refused by name."""

import pytest
import torch

import workbench as wb
from tests.plan import graphs
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.question import experiment_of
from workbench.plan.io.errors import ExperimentError
from workbench.plan.plans.plan import Plan

PLAN = Plan.hybrid(graphs.vgg(), 4, 2)
FIELDS = dict(plan=PLAN, data="digits", optimizer=wb.SGD(lr=0.1), steps=3, precision="fp16")


class Slow(wb.extend.Strategy):
    """Gradients as they are, by a strategy of one's own."""


def test_its_fields_are_those_of_torch():
    scale = wb.LossScale()
    assert dict(scale) == dict(
        init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000
    )


@pytest.mark.parametrize(
    ("given", "scaling"),
    [
        (None, wb.LossScale()),
        (128, 128.0),
        (0.3, 0.3),
        (wb.LossScale(init_scale=8), wb.LossScale(init_scale=8.0)),
    ],
)
def test_text_and_back(given, scaling, tmp_path):
    run = Experiment(**FIELDS, loss_scale=given)
    assert run.scaling == scaling
    run.save(tmp_path / "e.toml")
    assert Experiment.load(tmp_path / "e.toml") == run


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_only_fp16_is_scaled(precision):
    assert Experiment(**FIELDS | dict(precision=precision)).scaling is None
    with pytest.raises(
        ExperimentError, match=r"loss_scale lifts .* leave it out, or set precision"
    ):
        Experiment(**FIELDS | dict(precision=precision, loss_scale=8.0))


def test_another_precision_leaves_the_scale_behind():
    run = Experiment(**FIELDS, loss_scale=8.0)
    assert run.replace(precision="fp64") == Experiment(**FIELDS | dict(precision="fp64"))
    assert run.replace(steps=4).loss_scale == 8.0
    assert experiment_of("it", PLAN, PLAN, run, precision="bf16").scaling is None


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(init_scale=0), "init_scale: .*got 0"),
        (dict(init_scale=2.0**128), "init_scale"),
        (dict(init_scale=1e-5), "init_scale must be at least 0.0001"),
        (dict(growth_factor=1.0), "growth_factor: .*greater than 1"),
        (dict(backoff_factor=1.0), "backoff_factor: .*less than 1"),
        (dict(backoff_factor=0.0), "backoff_factor: .*greater than 0"),
        (dict(growth_interval=0), "growth_interval: .*got 0"),
        (dict(initial=8), "initial: there is no such field"),
    ],
)
def test_scales_that_cannot_follow(wrong, says):
    with pytest.raises(ExperimentError, match=f"^LossScale: .*{says}"):
        wb.LossScale(**wrong)


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), float("nan"), "large"])
def test_numbers_that_scale_nothing(wrong):
    with pytest.raises(ExperimentError, match="loss_scale"):
        Experiment(**FIELDS, loss_scale=wrong)


REFUSED = {
    "late": (dict(sync=wb.Pipelined(width=2)), "Pipelined"),
    "warm first": (dict(sync=wb.Pipelined(width=3, warmup=9)), "Pipelined"),
    "local": (dict(sync=wb.LocalSGD(every=1)), "LocalSGD"),
    "one's own": (dict(sync=wb.OwnStrategy(Slow())), "Slow"),
    "per round": (
        dict(plan=PLAN.with_rounds("B"), sync=wb.Synchronous(per_round=True)),
        "per_round=False",
    ),
    "a codec": (dict(sync=wb.Synchronous(codec="int8")), "codec 'int8'"),
    "a codec of one": (dict(sync=wb.Pipelined(width=1, codec="top_k")), "codec 'top_k'"),
}


@pytest.mark.parametrize(("fields", "named"), REFUSED.values(), ids=REFUSED)
def test_steps_that_cannot_be_skipped_are_refused(fields, named):
    with pytest.raises(ExperimentError, match=f"precision: .*{named}") as error:
        Experiment(**FIELDS | fields)
    assert "valid" in str(error.value) or "set precision='bf16'" in str(error.value)
    assert Experiment(**FIELDS | fields | dict(precision="bf16")).half


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_what_is_half(precision):
    assert Experiment(**FIELDS | dict(precision=precision)).half == (precision in ("bf16", "fp16"))


@pytest.mark.parametrize(
    ("given", "precision"),
    [
        ("BF16", "bf16"),
        ("bfloat16", "bf16"),
        (torch.bfloat16, "bf16"),
        (torch.float64, "fp64"),
        ("half", "fp16"),
        ("torch.float32", "fp32"),
    ],
    ids=str,
)
def test_torch_s_types_are_taken_for_precisions(given, precision):
    run = Experiment(**{**FIELDS, "precision": given})
    assert run.precision == precision
    assert Experiment.from_toml(run.to_toml()) == run


@pytest.mark.parametrize("given", ["fp8", torch.int8, 16, None])
def test_what_is_no_precision_is_refused(given):
    with pytest.raises(ExperimentError, match=r"precision: .*fp32.*bf16.*fp16.*fp64"):
        Experiment(**{**FIELDS, "precision": given})
