"""First steps that are synchronous, whatever the strategy does after them."""

from types import SimpleNamespace

import pytest
import torch

from workbench.train.strategy.strategy import WarmupStrategy


def warming(rules, said):
    class Warm(WarmupStrategy):
        residuals = ({"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([9.0])})

        def __init__(self):
            self.updater = SimpleNamespace(rules=rules)
            self._until, self._then = 2, lambda: said.append("begins") or own

        def close(self):
            said.append("closes")

    own = SimpleNamespace(residuals=[{"a": torch.zeros(2), "b": torch.ones(1)}])
    return Warm(), own


@pytest.mark.parametrize("with_rules", [False, True])
def test_later_steps_are_its_own_and_what_a_codec_has_left_out_is_not_forgotten(with_rules):
    said = []
    rules = SimpleNamespace(begin=lambda: said.append("rules begin")) if with_rules else None
    warm, own = warming(rules, said)
    assert [warm.at(step) for step in (0, 1, 2)] == [warm, warm, own]
    assert said == ["closes", "begins", *["rules begin"] * with_rules]
    assert own.residuals[0]["a"].tolist() == [1.0, 2.0]
    assert own.residuals[0]["b"].tolist() == [1.0]
