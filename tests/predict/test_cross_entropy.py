"""Memory of a language model whose scores are most of it, with the options of cross-entropy."""

import pytest
import torch
from torch import nn

import workbench as wb
from tests.predict import running
from workbench.model.weights.initial import initialize

VOCABULARY = 2048
OPTIONS = wb.CrossEntropy(weight=(0.5,) * VOCABULARY, label_smoothing=0.1)


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)

    def forward(self, ids):
        return self.head(self.table(ids).tanh())


@pytest.mark.parametrize("scheme", ["duplicate", "shard_out"])
@pytest.mark.parametrize("loss", [wb.CrossEntropy(), OPTIONS], ids=["ignoring", "smoothed"])
def test_peaks_are_the_measured_ones(on_ranks, tmp_path, scheme, loss):
    torch.manual_seed(0)
    module = Scores()
    graph = wb.trace(module, input_shape=(32,), vocabulary=VOCABULARY)
    plan = wb.Plan.data_parallel(graph, 2).with_layer("head", scheme=scheme, group_size=2)
    run = wb.Experiment(
        plan=plan, data="text", loss=loss, optimizer=wb.SGD(0.1), steps=3, batch_size=16
    )
    weights = initialize(graph, 0, tmp_path, module=module)
    predicted = wb.predict(run).memory.peak_bytes
    for measured in on_ranks.seated(2, running.peak_of_a_step, run, weights):
        assert predicted == pytest.approx(measured, rel=0.003)
