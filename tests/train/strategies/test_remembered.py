"""What torch's optimizers are built of, and what they remember, on small parameters."""

import pytest
import torch
from torch import nn

from workbench.plan.experiment.experiment import SGD, Adam, ParameterGroup
from workbench.plan.experiment.optimizers import ASGD, Adagrad, Adamax, NAdam
from workbench.train.optimizer.state import (
    build_optimizer,
    entry,
    forget,
    grouped,
    held_or_first,
    load_state,
    state_tensors,
)

MOMENTUM = SGD(lr=0.1, momentum=0.9)


def parameter(*values, **options):
    return nn.Parameter(torch.tensor(values, **options))


def updated(value, *parameters):
    """An optimizer after one update with gradients of 2."""
    optimizer = build_optimizer(value, list(parameters))
    for each in parameters:
        each.grad = torch.full_like(each, 2.0)
    optimizer.step()
    return optimizer


def test_parameters_without_elements_are_left_out():
    first, none = parameter(1.0, 2.0), parameter()
    optimizer = build_optimizer(MOMENTUM, [none, first, none])
    ((held,),) = [group["params"] for group in optimizer.param_groups]
    assert held is first
    assert build_optimizer(MOMENTUM, [none]).param_groups[0]["params"] == []


@pytest.mark.parametrize(
    ("value", "device", "fused", "foreach"),
    [
        (MOMENTUM, "cpu", True, None),
        (Adam(0.1), "cpu", True, None),
        (Adam(0.1), "meta", None, None),
        (Adamax(0.1), "cpu", None, False),
    ],
)
def test_updates_are_fused_where_torch_can(value, device, fused, foreach):
    held = nn.Parameter(torch.empty(2, device=device))
    options = build_optimizer(value, [held]).param_groups[0]
    assert (options.get("fused"), options["foreach"]) == (fused, foreach)


def test_every_parameter_must_be_one_that_can_be_fused():
    there, elsewhere = parameter(1.0), nn.Parameter(torch.empty(2, device="meta"))
    assert build_optimizer(MOMENTUM, [there, elsewhere]).param_groups[0]["fused"] is None


def test_groups_have_options_of_their_own():
    value = SGD(lr=0.1, groups=[ParameterGroup("head.*", lr=0.3)])
    one, two = parameter(1.0), parameter(2.0)
    first, second = build_optimizer(value, [one], [two]).param_groups
    assert first["params"][0] is one
    assert second["params"][0] is two
    assert (first["lr"], second["lr"]) == (0.1, 0.3)


def test_parameters_go_to_their_groups():
    value = SGD(
        lr=0.1, groups=[ParameterGroup("head.*", lr=0.3), ParameterGroup(dims=1, weight_decay=0.1)]
    )
    named = {
        name: parameter(1.0) for name in ("body.weight", "head.weight", "body.bias", "head.bias")
    }
    dims = {name: 1 if name.endswith("bias") else 2 for name in named}
    names = {id(each): name for name, each in named.items()}
    found = [[names[id(each)] for each in members] for members in grouped(value, named, dims)]
    assert found == [["body.weight"], ["head.weight", "head.bias"], ["body.bias"]]


def test_an_entry_names_state_and_parameter():
    assert entry("exp_avg", "fc.weight") == "optimizer/exp_avg/fc.weight"


def test_states_are_the_optimizer_s_own():
    weight, none = parameter(1.0, 2.0), parameter()
    optimizer = updated(MOMENTUM, weight)
    values = {"w": MOMENTUM, "none": MOMENTUM}
    found = state_tensors(optimizer, values, {"w": weight, "none": none})
    assert list(found) == ["optimizer/momentum_buffer/w"]
    assert found["optimizer/momentum_buffer/w"].tolist() == [2.0, 2.0]
    assert found["optimizer/momentum_buffer/w"] is optimizer.state[weight]["momentum_buffer"]


def test_before_its_first_update_a_parameter_has_what_torch_begins_with():
    weight = parameter(1.0, 2.0, dtype=torch.float64)
    value = Adagrad(0.1, initial_accumulator_value=0.5)
    found = held_or_first(build_optimizer(MOMENTUM, [weight]), value, weight, "sum")
    assert (found.tolist(), found.dtype, found.requires_grad) == ([0.5, 0.5], torch.float64, False)
    number = held_or_first(build_optimizer(MOMENTUM, [weight]), NAdam(), weight, "mu_product")
    assert (number.tolist(), number.dtype) == (1.0, torch.float32)


@pytest.mark.parametrize("value", [MOMENTUM, Adam(0.1), NAdam(0.1), ASGD(0.1), Adamax(0.1)])
def test_what_was_remembered_is_put_back(value):
    before, after = parameter(1.0, 2.0), parameter(1.0, 2.0)
    saved = state_tensors(updated(value, before), {"w": value}, {"w": before})
    with torch.no_grad():
        after.copy_(before)
    optimizer = build_optimizer(value, [after])

    def read(state, name):
        return saved[entry(state, name)].clone()

    load_state(optimizer, {"w": value, "none": value}, {"w": after, "none": parameter()}, read)
    old = build_optimizer(value, [before])
    load_state(old, {"w": value}, {"w": before}, read)
    assert set(optimizer.state[after]) == set(value.remembers.names)
    kept = state_tensors(optimizer, {"w": value}, {"w": after})
    assert {name: each.tolist() for name, each in kept.items()} == {
        name: each.tolist() for name, each in saved.items()
    }
    for each, its in ((before, old), (after, optimizer)):
        each.grad = torch.tensor([0.5, -1.0])
        its.step()
    assert after.tolist() == before.tolist()


def test_numbers_stay_wide_and_elements_are_as_the_parameter():
    weight = parameter(1.0, 2.0, dtype=torch.bfloat16)
    given = {"step": torch.tensor(257.0, dtype=torch.float64), "exp_avg": torch.ones(2)}
    optimizer = build_optimizer(Adam(0.1), [weight])
    load_state(optimizer, {"w": Adam(0.1)}, {"w": weight}, lambda s, _: given.get(s, torch.ones(2)))
    held = optimizer.state[weight]
    assert (held["step"].item(), held["step"].dtype) == (257.0, torch.float32)
    assert held["exp_avg"].dtype == held["exp_avg_sq"].dtype == torch.bfloat16


def test_what_was_never_updated_is_left_to_torch():
    weight = parameter(1.0)
    optimizer = build_optimizer(Adam(0.1), [weight])
    load_state(optimizer, {"w": Adam(0.1)}, {"w": weight}, lambda *_: torch.zeros(()))
    assert not optimizer.state
    plain = SGD(lr=0.1)
    optimizer = build_optimizer(plain, [weight])
    load_state(optimizer, {"w": plain}, {"w": weight}, lambda *_: torch.ones(1))
    assert not optimizer.state


@pytest.mark.parametrize("value", [MOMENTUM, Adagrad(0.1, initial_accumulator_value=0.5)])
def test_an_optimizer_forgets(value):
    once, twice = parameter(1.0, 2.0), parameter(1.0, 2.0)
    updated(value, once)
    optimizer = updated(value, twice)
    forget(optimizer, value)
    with torch.no_grad():
        twice.copy_(torch.tensor([1.0, 2.0]))
    optimizer.step()
    assert twice.tolist() == once.tolist()
