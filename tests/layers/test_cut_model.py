"""Modes of a cut model's parts."""

import pytest

from tests.layers import nets
from workbench.model.tracing.trace import trace
from workbench.plan.plans.plan import Plan


class Still(nets.Images):
    """One of its norms stays in eval mode while the model trains."""

    def __init__(self):
        super().__init__()
        self.features[1].eval()


def modes(world):
    plan = Plan.data_parallel(trace(Still(), input_shape=Still.shape), 1)
    model = nets.cut_net(world, plan, Still, (2,))
    norms = [model.traced.get_submodule(f"features.{place}") for place in (1, 7)]
    found = []
    for mode in (True, False, True):
        model.train(mode)
        found.append([norm.training for norm in norms])
    return found, model.train() is model


@pytest.mark.slow
def test_parts_in_eval_mode_stay_so_and_others_come_back(on_ranks):
    ((found, same),) = on_ranks(1, modes)
    assert found == [[False, True], [False, False], [False, True]]
    assert same
