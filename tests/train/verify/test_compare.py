"""A rank that is alone, held against one process: what is compared, and what mistakes it finds."""

from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import TCPStore

from workbench.client.verifying import experiment_for
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.placement.placement import RankConfig
from workbench.plan.plans.plan import Plan
from workbench.train.verify.verify import compare, write_reference


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


GRAPH = trace(net(), input_shape=(6,))


@pytest.fixture(scope="module")
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """An experiment, the weights that it starts from, and the reference."""
    folder = tmp_path_factory.mktemp("reference")
    plan = Plan.data_parallel(GRAPH, 1).with_batch_norm("synchronized")
    given = dict(batch_size=8, steps=2, precision="fp64", optimizer=None, data=None, seed=0)
    experiment = experiment_for(plan, **given)
    start, reference = folder / "start.safetensors", folder / "reference.safetensors"
    weights = initialize(GRAPH, 0, folder, module=net())
    write_reference(experiment, weights, start, reference)
    return experiment, start, reference


@pytest.fixture
def found(there, store, tmp_path):
    """What a comparison finds, with some entries of the reference changed."""
    experiment, start, reference = there

    def found(*, repeat=False, **changed):
        entries, path = load_file(reference), tmp_path / "changed.safetensors"
        for name, change in changed.items():
            assert name in entries, sorted(entries)
            entries[name] = change(entries[name])
        save_file(entries, path)
        config = RankConfig(0, 1, "127.0.0.1", store.port, str(tmp_path))
        threads = torch.get_num_threads()
        try:
            return compare(config, experiment, weights=start, reference=path, repeat=repeat)[0]
        finally:
            torch.set_num_threads(threads)

    return found


def off(differences):
    """By how much, of what is off by more than rounding."""
    return {(d.what, d.name): d.error for d in differences if d.error > 1e-10}


def test_everything_is_compared_and_equal(found):
    differences = found(repeat=True)
    assert off(differences) == {}
    assert {d.rank for d in differences} == {0}
    names = {}
    for difference in differences:
        names.setdefault(difference.what, []).append(difference.name)
    parameters = list(GRAPH.trainable)
    assert names["output"] == ["3"]
    assert sorted(names["gradient"]) == sorted(names["weight"]) == sorted(parameters)
    buffers = ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    assert sorted(names["buffer"]) == buffers
    assert sorted(names["optimizer"]) == sorted(f"momentum_buffer/{name}" for name in parameters)
    assert sorted(names["evaluation"]) == ["accuracy", "loss"]
    assert sorted(names["repeat"]) == sorted([*parameters, *buffers])


def test_once_is_not_compared_with_a_second_run(found):
    assert "repeat" not in {d.what for d in found()}


@pytest.mark.parametrize(
    ("entry", "what", "name"),
    [
        ("output/0", "output", "3"),
        ("gradient/0.weight", "gradient", "0.weight"),
        ("weight/3.bias", "weight", "3.bias"),
        ("buffer/1.running_mean", "buffer", "1.running_mean"),
        ("optimizer/momentum_buffer/0.bias", "optimizer", "momentum_buffer/0.bias"),
        ("evaluation/loss", "evaluation", "loss"),
    ],
)
def test_one_element_that_is_off_is_found_where_it_is(found, entry, what, name):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[-1] += 0.5
        return tensor

    assert list(off(found(**{entry: change}))) == [(what, name)]


def test_an_error_is_relative_to_the_largest_entry_of_an_output(found):
    def change(tensor):
        return tensor + 0.5

    def four(scale):
        return torch.full_like(scale, 4.0)

    found = off(found(**{"output/0": change, "scale/output/0": four}))
    assert found == {("output", "3"): pytest.approx(0.125)}


def test_what_is_no_number_is_infinitely_far(found):
    def change(tensor):
        return torch.full_like(tensor, float("nan"))

    assert off(found(**{"gradient/0.weight": change})) == {("gradient", "0.weight"): float("inf")}


def test_a_second_run_that_differs_is_found(found):
    forward, calls = nn.functional.linear, []

    def other(inputs, weight, bias=None):
        calls.append(None)
        return forward(inputs, weight, bias) * (1 + 1e-13 * len(calls))

    with patch("torch.nn.Linear.forward", lambda m, x: other(x, m.weight, m.bias)):
        differences = found(repeat=True)
    assert any(d.what == "repeat" and 0 < d.error < 1e-9 for d in differences)
    assert off(differences) == {}
