"""Models that read several inputs, on ranks: all of it as plain torch computes it."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from tests.layers.several import NETS, Fused, Joined, Placed
from tests.oracle.running import Leg, on
from tests.train.runs import verified
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import SGD, Adam, Experiment, Synthetic
from workbench.plan.experiment.task import TorchData
from workbench.plan.io.errors import PlanError
from workbench.plan.plans.plan import Plan
from workbench.train.checkpoint.checkpoint import state_dict
from workbench.train.data.datasets import open_for
from workbench.train.data.feed import rows_of_step
from workbench.train.run.requests import RunRequests

SAMPLES, BATCH = 14, 7
RANKS = 3

PLANS = {
    "rows": lambda graph: Plan.data_parallel(graph, RANKS, (2, 0, 1)),
    "hybrid": lambda graph: Plan.hybrid(graph, RANKS, RANKS),
    "filters": lambda graph: Plan.filters(graph, RANKS, shares=(3, 0, 2)),
    "recomputed": lambda graph: Plan.hybrid(graph, RANKS, RANKS).with_recompute("*"),
    "rounds": lambda graph: (
        Plan.data_parallel(graph, RANKS)
        .with_layer(graph.layers[-1].name, scheme="shard_out", group_size=RANKS)
        .with_rounds("B")
    ),
}


def made(net):
    torch.manual_seed(0)
    return net()


def experiment(net, plan, **more):
    data = Synthetic(samples=SAMPLES, classes=net.CLASSES)
    fields = dict(data=data, batch_size=BATCH, optimizer=SGD(lr=0.1), steps=2, precision="fp64")
    return Experiment(plan=plan, **fields | more)


def whole(net, run):
    """The loss of the last step, and the weights after it, of plain torch."""
    model, data = made(net).double(), open_for(run.plan.graph, run.data, "train", run.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(run.steps):
        inputs, labels = data.batch(rows_of_step(SAMPLES, BATCH, run.seed, step))
        named = dict(zip(net.INPUTS, inputs, strict=True))
        outputs = model(**{n: x.double() if x.is_floating_point() else x for n, x in named.items()})
        scores, wanted = outputs.reshape(-1, outputs.shape[-1]), labels.reshape(-1)
        loss = F.cross_entropy(scores, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item(), dict(model.named_parameters())


CASES = [(net, kind) for net in NETS for kind in PLANS if kind != "rounds"]


@pytest.mark.parametrize(("net", "kind"), [*CASES, (Joined, "rounds")])
def test_every_value_is_that_of_one_process(on_ranks, tmp_path, net, kind):
    """In rounds, both inputs are in the head, and the tail reads none."""
    graph = trace(made(net), inputs=net.INPUTS)
    found = verified(on_ranks, tmp_path, experiment(net, PLANS[kind](graph)), made(net))
    assert found.exact, found
    assert {d.name for d in found.differences if d.what == "weight"} == set(graph.trainable)


def test_what_is_behind_the_gather_may_not_read_another_input_in_rounds():
    graph = trace(made(Placed), inputs=Placed.INPUTS)
    plan = Plan.data_parallel(graph, RANKS).with_layer("fc", scheme="shard_out", group_size=RANKS)
    with pytest.raises(PlanError, match=r"layer 'mul' gathers rows of 'getitem' after layer 'fc'"):
        plan.with_rounds("B")


class Samples(torch.utils.data.Dataset):
    """Token ids with a mask, as a mapping, and the next tokens."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(7, (6,), generator=generator)
        return {"ids": ids[:-1], "mask": torch.arange(5) < 1 + index % 5}, ids[1:]


@pytest.mark.parametrize("kind", ["rows", "hybrid"])
def test_own_data_of_several_inputs_is_verified(on_ranks, tmp_path, kind):
    graph = trace(made(Fused), inputs=Fused.INPUTS)
    data = TorchData(train=Samples(), test=Samples())
    run = experiment(Fused, PLANS[kind](graph), data=data, optimizer=Adam(lr=0.01), accumulate=2)
    assert verified(on_ranks, tmp_path, run, made(Fused)).exact


class Listed(torch.utils.data.Dataset):
    """An image and what is known of it, as a list in the model's order, and a class."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return [torch.randn(n, generator=generator) for n in (6, 4)], index % 3


DATA = {
    Joined: TorchData(train=Listed(), test=Listed()),
    Fused: TorchData(train=Samples(), test=Samples()),
    Placed: Synthetic(samples=SAMPLES, classes=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["resumed", "re-cut"])
@pytest.mark.parametrize("net", DATA)
def test_a_run_goes_on_under_another_plan(on_ranks, tmp_path, net, way):
    """From a list, a mapping and made data; the epoch ends in the second half."""
    graph = trace(made(net), inputs=net.INPUTS)
    run = experiment(net, PLANS["hybrid"](graph), data=DATA[net], steps=4)
    after = run.replace(plan=PLANS["rows"](graph))
    weights = initialize(graph, 0, tmp_path, module=made(net))
    if way == "resumed":
        first, outcome = on(on_ranks.seated, Leg(run, weights, tmp_path, stop=True))
        rest, outcome = on(on_ranks.seated, Leg(after, weights, tmp_path, Path(outcome.checkpoint)))
        seen = first + rest
    else:
        RunRequests(tmp_path).submit(after.plan)
        seen, outcome = on(on_ranks.seated, Leg(run, weights, tmp_path))
    expected = [whole(net, run.replace(steps=count + 1)) for count in range(run.steps)]
    assert [len({rank.rows for rank in ranks}) for ranks in seen] == [1] * run.steps
    assert seen[0][0].rows != seen[1][0].rows, "the second step is under the other plan"
    for ranks, (loss, _) in zip(seen, expected, strict=True):
        assert ranks[0].loss == pytest.approx(loss, rel=1e-12)
    values = state_dict(Path(outcome.checkpoint), graph)
    for name, parameter in expected[-1][1].items():
        assert_close(values[name].double(), parameter.detach(), rtol=1e-10, atol=1e-12)
