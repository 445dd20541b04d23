"""An interrupt in the midst of a trace leaves torch as it was."""

import pytest
import torch
from torch import nn, overrides
from torch.utils import _python_dispatch

from workbench.model import trace


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


class Interrupts:
    """Interrupts a thread right after it has done something for the nth time.

    Args:
        does: what it does.
        at: when it is interrupted; 0: never.
    """

    def __init__(self, does, at):
        self.does, self.at, self.count = does, at, 0

    def __call__(self, *args):
        self.count += 1
        result = self.does(*args)
        if self.count == self.at:
            raise KeyboardInterrupt
        return result


# Each of these is called where a mode starts, before `with` knows that it is to end it.
STARTS = {
    "fake tensors": (_python_dispatch, "_push_mode"),
    "functions": (overrides, "_push_mode"),
    "gradients": (torch.no_grad, "__enter__"),
}


@pytest.mark.parametrize("what", STARTS)
def test_modes_end_with_the_trace(what, monkeypatch):
    owner, name = STARTS[what]
    model = Model()
    whole = trace(model, input_shape=(6,))
    counted = Interrupts(getattr(owner, name), 0)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, lambda *args: counted(*args))
        trace(model, input_shape=(6,))
    assert counted.count
    for at in range(1, counted.count + 1, max(1, counted.count // 10)):
        interrupts = Interrupts(counted.does, at)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, lambda *args, stop=interrupts: stop(*args))
            with pytest.raises(KeyboardInterrupt):
                trace(model, input_shape=(6,))
        assert torch.is_grad_enabled()
        assert type(torch.empty(2)) is torch.Tensor
        assert overrides._get_current_function_mode_stack() == []
    again = trace(model, input_shape=(6,))
    assert (again.fingerprint, again.parameters) == (whole.fingerprint, whole.parameters)
