"""Verification finds the field's usual mistakes, made here on purpose."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

from workbench.client.verifying import experiment_for, merge
from workbench.comm.pending import Pending
from workbench.comm.regions import reduce_scatter_to
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.task import CrossEntropy
from workbench.plan.plans.plan import Plan
from workbench.train.verify.verification import KINDS, Difference, Verification
from workbench.train.verify.verify import compare
from workbench.train.verify.whole_model import write_reference


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 12),
        nn.ReLU(),
        nn.Linear(12, 8),
        nn.ReLU(),
        nn.Linear(8, 5),
    )


def plan():
    graph = trace(net(), input_shape=(3, 4, 4))
    cut = Plan.data_parallel(graph, world_size=2).with_batch_norm("synchronized")
    return cut.with_layer("4", scheme="shard_out", group_size=2).with_layer(
        "6", scheme="shard_in", group_size=2
    )


class Nothing(Pending):
    """A sum of gradients that never takes place."""

    by_itself = False

    def __init__(self, *_args, **_options):
        pass

    def poll(self):
        return True

    def wait(self):
        pass


def twice(module, *inputs):
    return 2 * nn.functional.linear(inputs[0], module.weight, module.bias)


def bias_on_every_rank(x, shard, group, **options):
    """As if every rank added a bias that only one should."""
    return reduce_scatter_to(x, shard, group, **options) + 0.01


def a_little_at_random(module, *inputs):
    """Far less than any tolerance, and another bit each time."""
    y = nn.functional.linear(inputs[0], module.weight, module.bias)
    return y * (1 + 1e-14 * torch.randn((), dtype=y.dtype))


def in_training(model):
    """Evaluates as it trains."""
    return model.train()


def less_momentum(value, parameters):
    return torch.optim.SGD([{"params": list(parameters)}], lr=value.lr, momentum=0.8)


def as_they_are(model):
    """Every rank keeps its own statistics."""


def momentum_alone(share, momentum):
    """As if ranks without rows knew as much as the others."""
    share.value = share.group_size / len(share.context.rows)
    return momentum


MISTAKES = {
    "none": {},
    "evaluation": {"workbench.layers.cut_model.CutModel.eval": in_training},
    "optimizer": {"workbench.train.optimizer.optimizer.build_optimizer": less_momentum},
    "buffer": {"workbench.train.verify.verify.average_statistics": as_they_are},
    "equal weights": {"workbench.layers.local.norms.RunningShare.factor": momentum_alone},
    "repeat": {"torch.nn.Linear.forward": a_little_at_random},
    "gradients that are not summed": {
        "workbench.train.strategy.reduction.start_all_reduce": Nothing
    },
    "a summand too many": {"workbench.layers.local.convert.reduce_scatter_to": bias_on_every_rank},
    "a constant factor": {"torch.nn.Linear.forward": twice},
}


def compare_with(config, mistake, experiment, start, reference, given):
    with ExitStack() as stack:
        for target, wrong in MISTAKES[mistake].items():
            stack.enter_context(patch(target, wrong))
        return compare(config, experiment, weights=start, reference=reference, **given)[0]


def verified(
    on_ranks, tmp_path, mistake, precision="fp64", *, of=None, module=None, loss=None, repeat=True
):
    experiment = experiment_for(
        of or plan(),
        batch_size=None,
        steps=2,
        precision=precision,
        optimizer=None,
        data=None,
        loss=loss,
        seed=0,
    )
    start, reference = tmp_path / "start.safetensors", tmp_path / "reference.safetensors"
    weights = initialize(experiment.plan.graph, 0, tmp_path, module=module or net())
    write_reference(experiment, weights, start, reference)
    size, given = experiment.plan.world_size, dict(repeat=repeat)
    found = on_ranks.seated(size, compare_with, mistake, experiment, start, reference, given)
    return merge(experiment, found)


def test_a_right_split_is_exact(on_ranks, tmp_path):
    found = verified(on_ranks, tmp_path, "none")
    assert found.exact, found
    assert {d.rounding for d in found.differences} == {0.0}
    assert found.kinds == KINDS
    assert found.repeatable
    assert "covered 9 of 9 operations, gradients of 10 of 10 parameters" in repr(found)
    assert "two runs are alike" in found._repr_html_()
    names = {weight.name for layer in plan().graph.layers for weight in layer.weights}
    assert {d.name for d in found.differences if d.what in ("weight", "buffer")} == names
    remembered = {d.name for d in found.differences if d.what == "optimizer"}
    assert remembered == {f"momentum_buffer/{name}" for name in plan().graph.trainable}


SUMS = ("gradients that are not summed", "a summand too many", "a constant factor")


@pytest.mark.parametrize("mistake", ["evaluation", "optimizer", "repeat"])
def test_each_kind_finds_its_own(on_ranks, tmp_path, mistake):
    found = verified(on_ranks, tmp_path, mistake)
    assert not found.exact
    assert found.of(mistake).error > found.tolerance(mistake)
    if mistake != "optimizer":  # what the optimizer does to weights is seen there, too
        assert all(found.of(k).error <= found.tolerance(k) for k in KINDS if k != mistake)
    assert found.repeatable == (mistake != "repeat")


UNEQUAL = Plan.data_parallel(trace(net(), input_shape=(3, 4, 4)), 3, (2, 1, 0))


@pytest.mark.parametrize("mistake", ["none", "buffer", "equal weights"])
def test_local_statistics_are_compared(on_ranks, tmp_path, mistake):
    found = verified(on_ranks, tmp_path, mistake, of=UNEQUAL, repeat=False)
    assert found.repeatable is None
    assert found.exact == (mistake == "none"), found
    assert ("buffer", "1.running_var") in {(d.what, d.name) for d in found.differences}
    if mistake != "none":
        assert found.of("buffer").error > 1e-3


class Unused(nn.Module):
    """Two outputs, a parameter that nothing reads, and one that no gradient reaches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.other = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(8, 3)
        self.cut = nn.Linear(6, 8)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = torch.relu(self.body(x)) + self.cut(x).detach()
        return self.head(y), self.other(y)


def own(outputs, labels):
    """Weighted by row, of both outputs."""
    scores, others = outputs
    smooth = F.cross_entropy(scores, labels, reduction="none", label_smoothing=0.1)
    return smooth * (1 + labels) + (others - 1).square().sum(1)


def test_a_loss_of_the_user_s_own(on_ranks, tmp_path):
    """Also where a rank has no rows, and where an output's features are cut."""
    graph = trace(Unused(), input_shape=(6,), outputs=("prediction", "auxiliary"))
    rows = Plan.data_parallel(graph, 3, (2, 1, 0))
    cut = rows.with_layer("head", scheme="shard_out", group_size=3, shares=(1, 3, 1))
    whole = cut.with_layer("other", scheme="duplicate", group_size=3)
    for of in (rows, whole):
        found = verified(on_ranks, tmp_path, "none", of=of, module=Unused(), loss=own)
        assert found.exact, found
        assert {d.name for d in found.differences if d.what == "output"} == {"head", "other"}
        assert found.coverage.gradients == found.coverage.parameters == 6
        assert found.coverage.seen == found.coverage.operations
        assert found.coverage.missing == ()


@pytest.mark.parametrize("ignored", [0, 1])
def test_cross_entropy_with_options(on_ranks, tmp_path, ignored):
    """Its classes are cut; a label that is ignored counts in no figure."""
    graph = trace(Unused(), input_shape=(6,), outputs=("prediction", "unused"))
    cut = Plan.data_parallel(graph, 3, (2, 1, 0))
    cut = cut.with_layer("head", scheme="shard_out", group_size=3, shares=(1, 3, 1))
    options = CrossEntropy(ignore_index=ignored, label_smoothing=0.1)
    found = verified(on_ranks, tmp_path, "none", of=cut, module=Unused(), loss=options)
    assert found.exact, found
    names = {d.name for d in found.differences if d.what == "evaluation"}
    assert names == {"loss", "accuracy"}


@pytest.mark.parametrize("mistake", SUMS)
def test_a_mistake_is_found(on_ranks, tmp_path, mistake):
    found = verified(on_ranks, tmp_path, mistake)
    assert not found.exact
    assert found.worst.error > 1e-6


def test_in_single_precision_rounding_is_known(on_ranks, tmp_path):
    found = verified(on_ranks, tmp_path, "none", "fp32")
    assert found.exact, found
    assert 0 < found.of("gradient").rounding < 1e-4


def test_no_weight_starts_as_a_constant(tmp_path):
    experiment = experiment_for(
        plan(), batch_size=4, steps=1, precision="fp64", optimizer=None, data=None, seed=0
    )
    start = tmp_path / "start.safetensors"
    weights = initialize(experiment.plan.graph, 0, tmp_path, module=net())
    write_reference(experiment, weights, start, tmp_path / "reference.safetensors")
    with safe_open(weights, "pt") as before, safe_open(start, "pt") as after:
        assert torch.equal(before.get_tensor("4.weight"), after.get_tensor("4.weight"))
        assert torch.equal(before.get_tensor("1.running_var"), after.get_tensor("1.running_var"))
        for name in ("1.weight", "1.bias"):
            assert before.get_tensor(name).unique().numel() == 1
            assert after.get_tensor(name).unique().numel() == 4


def of(error, rounding, precision="fp32"):
    found = (Difference("gradient", "w", 0, error, rounding), Difference("gradient", "v", 0, 0.0))
    return Verification("net", precision, 1, found)


def test_rounding_of_the_unsplit_model_widens_the_tolerance():
    assert of(1e-4, 0.0).exact
    assert not of(1.1e-4, 0.0).exact
    assert of(9.9e-2, 1e-2).exact
    assert not of(1.01e-1, 1e-2).exact
    assert "rounding alone" in of(3.9e-2, 1e-2)._repr_html_()
    assert "rounding alone" not in of(3.9e-5, 1e-5)._repr_html_()
    assert not of(float("inf"), 1e-2).exact


def test_no_rounding_excuses_a_wrong_factor():
    assert of(0.2, 0.13).exact
    assert not of(0.25, 0.13).exact  # of what one of four ranks leaves out
    assert not of(1.0, 10.0).exact  # of what is counted twice


def test_the_worst_is_measured_by_its_tolerance():
    """A weight's may be large, where rounding alone moves weights as far."""
    tight = Difference("output", "y", 0, 1.1e-4, 0.0)
    wide = Difference("weight", "w", 0, 5e-2, 1e-2)
    assert Verification("net", "fp32", 1, (wide, tight)).worst == tight


class InSinglePrecision(nn.Module):
    """Computes a norm in fp32, whatever the model's precision."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(6, 12), nn.Linear(12, 5)
        self.weight = nn.Parameter(torch.ones(12))

    def forward(self, x):
        y = self.into(x).to(torch.float32)
        y = y * y.pow(2).mean(-1, keepdim=True).rsqrt() * self.weight.to(torch.float32)
        return self.out(y.to(x.dtype))


@pytest.mark.parametrize("mistake", ["none", "gradients that are not summed"])
def test_what_a_model_rounds_by_itself_is_told_from_a_mistake(on_ranks, tmp_path, mistake):
    of = Plan.data_parallel(trace(InSinglePrecision(), input_shape=(6,)), 2, (3, 1))
    module = InSinglePrecision()
    found = verified(on_ranks, tmp_path, mistake, of=of, module=module, repeat=False)
    assert found.of("gradient").error > 1e-9
    assert 1e-9 < found.tolerance("gradient") < 1e-5
    assert found.tolerance("output") == 1e-10
    assert found.exact == (mistake == "none"), found
    assert "computes in fp32 by itself" in found._repr_html_()
