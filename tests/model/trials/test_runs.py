"""What is like an operation before is not run again, and nothing else is taken for it."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import workbench as wb
from workbench.bench.harness.nets import GPT
from workbench.model.record import runs
from workbench.model.record.runs import Runs


class Twice(nn.Module):
    """Two equal blocks."""

    def __init__(self, make) -> None:
        super().__init__()
        self.first, self.second, self.head = make(), make(), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x.flatten(1))))


class InPlace(nn.Module):
    """Writes into a part of what it has made."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(x) + 1
        y[:, :2].mul_(2)
        return y


class Mixed(nn.Module):
    """Views, parts, a constant and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        a, b = (x * torch.tensor(2.0)).chunk(2, 1)
        joined = torch.cat((self.dropout(a), b.cumsum(1)), 1)
        return F.dropout(joined, 0.1, self.training) + torch.rand(len(x), 1)


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """How often modules were called, at either batch size, by their classes."""
    counted: Counter[str] = Counter()
    run = Runs.run

    def counting(self, call, target, module, arguments):
        def called(args, kwargs):
            counted[type(module).__name__] += 1
            return call(args, kwargs)

        return run(self, called, target, module, arguments)

    monkeypatch.setattr(Runs, "run", counting)
    return counted


def traced(net: nn.Module, **options) -> wb.Graph:
    return wb.trace(net, **{"input_shape": (6,), "num_classes": 4, **options})


NETS = {
    "mlp": (lambda: Twice(lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU())), {}),
    "in place": (lambda: Twice(InPlace), {}),
    "mixed": (lambda: Twice(Mixed), {}),
    "dropout": (lambda: Twice(lambda: nn.Dropout(0.5)), {}),
    "language": (lambda: GPT(3, 128, 8, 20), {"input_shape": (8,), "vocabulary": 20}),
    "convolutions": (
        lambda: nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(True))
                for _ in range(3)
            ),
            nn.Flatten(),
            nn.Linear(192, 4),
        ),
        {"input_shape": (3, 8, 8)},
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_the_graph_is_as_if_all_were_run(name, monkeypatch):
    make, options = NETS[name]
    torch.manual_seed(0)
    net = make()
    found = traced(net, **options)
    monkeypatch.setattr(runs, "key_of", lambda *_: None)
    assert traced(net, **options) == found


def test_equal_layers_are_run_once(calls):
    """At two batch sizes, in two modes; of the three linear layers two are equal."""
    traced(NETS["mlp"][0]())
    assert calls["GELU"] == 4
    assert calls["Linear"] == 8


def test_a_layer_with_a_hook_is_like_no_other(calls):
    def make() -> nn.Module:
        layer = nn.GELU()
        layer.register_forward_hook(lambda *_: None)
        return layer

    traced(Twice(make))
    assert calls["GELU"] == 8


def test_a_view_is_run_each_time():
    """Its memory is its source's: what is written there is seen."""
    mode = runs.FakeTensorMode()
    one = Runs(mode, {})
    with mode:
        given = [((torch.empty(b, 6),), {}) for b in (2, 3)]
    for _ in range(2):
        ran = one.run(lambda args, kwargs: args[0].t(), "t", None, given)
        assert all(
            value.untyped_storage()._cdata == args[0].untyped_storage()._cdata
            for value, (args, _) in zip(ran.values, given, strict=True)
        )


def test_one_that_gives_what_it_gets_is_run_each_time():
    mode = runs.FakeTensorMode()
    one, layer = Runs(mode, {}), nn.Dropout(0.5).eval()
    with mode:
        first, second = ([((torch.empty(b, 6),), {}) for b in (2, 3)] for _ in range(2))
    for given in (first, second):
        ran = one.run(lambda args, kwargs: layer(*args), "", layer, given)
        assert all(v is args[0] for v, (args, _) in zip(ran.values, given, strict=True))


def test_kinds_of_numbers_are_told_apart():
    """1, 1.0 and True are equal, and give other types."""
    mode = runs.FakeTensorMode()
    one = Runs(mode, {})
    with mode:
        tensors = [torch.empty(b, 6, dtype=torch.int64) for b in (2, 3)]
    types = [
        one.run(
            lambda args, kwargs: args[0] * args[1],
            "mul",
            None,
            [((x, number), {}) for x in tensors],
        )
        .values[0]
        .dtype
        for number in (1, 1.0, True)
    ]
    assert types == [torch.int64, torch.float32, torch.int64]


def test_strides_are_told_apart():
    """Of a transposed tensor what is computed element by element is transposed, too."""
    mode = runs.FakeTensorMode()
    one = Runs(mode, {})
    with mode:
        square = torch.empty(6, 6)
    for x in (square, square.t()):
        ran = one.run(lambda args, kwargs: args[0].relu(), "relu", None, [((x,), {})] * 2)
        assert ran.values[0].stride() == x.stride()
