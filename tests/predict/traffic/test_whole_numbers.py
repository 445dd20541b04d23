"""Whole numbers that a model makes are sent in their own size, whatever that is."""

import pytest
from torch import nn

from tests.predict.test_several_inputs import recorded
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import Experiment, Synthetic
from workbench.plan.plans.plan import Plan
from workbench.predict.traffic.traffic import traffic_of
from workbench.program.step import program_of


class Places(nn.Module):
    """Tokens and their places among those that are no padding, counted in int32 or in int64."""

    def __init__(self, counted):
        super().__init__()
        self.counted = counted
        self.tokens, self.places = nn.Embedding(20, 12), nn.Embedding(9, 12)
        self.head = nn.Linear(12, 20)

    def forward(self, ids):
        there = ids.ne(0).int()
        places = there.cumsum(1).type_as(there) * there
        places = places.long() + 0 if self.counted == "int64" else places
        return self.head(self.tokens(ids) + self.places(places))


@pytest.mark.parametrize("counted", ["int32", "int64"])
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_traffic_is_the_recorded_one(on_ranks, tmp_path, counted, precision):
    module = Places(counted)
    graph = trace(module, input_shape=(8,), vocabulary=20)
    plan = Plan(graph, 2).with_layer("places", scheme="shard_out", group_size=2)
    data = Synthetic(samples=16, classes=20)
    run = Experiment(
        plan=plan, data=data, batch_size=6, steps=3, precision=precision, optimizer="adamw"
    )
    weights = initialize(graph, 0, tmp_path, module=module)
    predicted = traffic_of(program_of(run))
    for rank, rows in enumerate(on_ranks(2, recorded, run, weights)):
        assert sorted(predicted.rows(rank)) == sorted(rows)
        assert any(layer == "places" for _, _, layer, *_ in rows)
