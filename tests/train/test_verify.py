"""Verification finds the field's usual mistakes, made here on purpose."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from torch import nn

from workbench.cluster.verifying import experiment_for, merge
from workbench.comm.pending import Pending
from workbench.comm.regions import reduce_scatter_to
from workbench.model.trace import trace
from workbench.model.weights import initialize
from workbench.plan.plan import Plan
from workbench.train.reference import write_reference
from workbench.train.verification import Difference, Verification
from workbench.train.verify import compare


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


MISTAKES = {
    "none": {},
    "gradients that are not summed": {"workbench.train.gradients.start_all_reduce": Nothing},
    "a summand too many": {"workbench.layers.convert.reduce_scatter_to": bias_on_every_rank},
    "a constant factor": {"torch.nn.Linear.forward": twice},
}


def compare_with(seat, mistake, experiment, start, reference):
    with ExitStack() as stack:
        for target, wrong in MISTAKES[mistake].items():
            stack.enter_context(patch(target, wrong))
        return compare(seat, experiment, weights=start, reference=reference)


def verified(on_ranks, tmp_path, mistake, precision="fp64"):
    experiment = experiment_for(
        plan(),
        batch_size=None,
        steps=2,
        precision=precision,
        optimizer=None,
        data=None,
        seed=0,
    )
    start, reference = tmp_path / "start.safetensors", tmp_path / "reference.safetensors"
    weights = initialize(experiment.plan.graph, 0, tmp_path, module=net())
    write_reference(experiment, weights, start, reference)
    found = on_ranks.seated(2, compare_with, mistake, experiment, start, reference)
    return merge(experiment, found)


def test_a_right_split_is_exact(on_ranks, tmp_path):
    found = verified(on_ranks, tmp_path, "none")
    assert found.exact, found
    assert {d.rounding for d in found.differences} == {0.0}


@pytest.mark.parametrize("mistake", [name for name in MISTAKES if name != "none"])
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
