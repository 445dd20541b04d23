"""A strategy of a cell is checked, trained, resumed and re-cut on a cluster."""

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.client.checks.strategies import checks_of
from workbench.plan.experiment.sync import Strategy

LONG_S = 240.0


def slow_mo(**options):
    """As in a cell: its class is nowhere to be imported from."""

    class SlowMo(Strategy):
        exchanges = "weights"
        remembers = {"slow": "weight", "speed": 0.0}  # noqa: RUF012

        def __init__(self, every=3, beta=0.7):
            self.every, self.beta = every, beta

        def averaged(self, step, mean, state):
            state["speed"].mul_(self.beta).add_(state["slow"] - mean)
            state["slow"].sub_(state["speed"])
            return state["slow"]

    return SlowMo(**options)


def late():
    class Damped(Strategy):
        late, keeps_weights, warmup = 1, True, 2
        remembers = {"moved": 0.0}  # noqa: RUF012

        def gradient(self, step, grad, weight, then, state):
            state["moved"].mul_(0.9).add_((weight - then).abs())
            return grad / (1 + state["moved"])

    return Damped()


class Third(Strategy):
    every = 3

    def gradient(self, step, grad, weight, then, state):
        return grad / 3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [slow_mo(), late(), Third()], ids=["means", "late", "sums"])
def test_a_right_one_passes(cluster, strategy):
    found = checks_of(strategy, cluster)
    assert all(check.ok for check in found), found
    gradients = strategy.exchanges == "gradients"
    assert len(found) == 6 + gradients
    assert len({check.what for check in found}) == len(found)


class Mixing(Strategy):
    def gradient(self, step, grad, weight, then, state):
        return grad / (grad.abs().max() + 1)


class Rank(Strategy):
    """Differs by rank: what nobody can try beforehand."""

    def gradient(self, step, grad, weight, then, state):
        import os

        return grad * (1 + int(os.environ.get("WORKBENCH_ENGINE", "0")))


class Memo(Strategy):
    """Remembers in a mutable object, which no checkpoint has."""

    def __init__(self):
        self.seen = {}

    def gradient(self, step, grad, weight, then, state):
        calls = self.seen.setdefault(grad.shape, []) if grad.dim() == 2 else []
        calls.append(step)
        return grad / (len(calls) + 1)


class Failing(Strategy):
    def gradient(self, step, grad, weight, then, state):
        if grad.dim() > 1:
            raise RuntimeError("a weight has two dimensions")
        return grad


@pytest.mark.parametrize(
    ("strategy", "wrong"),
    [
        (Mixing(), "works element by element"),
        (Rank(), "all ranks have the same bits"),
        (Memo(), "a resumed run leaves the bits of the uninterrupted one"),
        (Failing(), "runs"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Strategy) else "",
)
def test_what_is_wrong_is_found(cluster, strategy, wrong):
    found = {check.what: check for check in checks_of(strategy, cluster)}
    assert not found[wrong].ok, found


class Same(Strategy):
    """Claims to be exact, and remembers something for itself."""

    inexact = ""
    remembers = {"largest": 0.0}  # noqa: RUF012

    def gradient(self, step, grad, weight, then, state):
        torch.maximum(state["largest"], grad.abs(), out=state["largest"])
        return grad


class Doubled(Same):
    def gradient(self, step, grad, weight, then, state):
        return 2 * grad


@pytest.mark.slow
def test_what_claims_to_be_exact_is_verified(cluster):
    fields = dict(batch_size=8, optimizer=wb.SGD(lr=0.01), steps=2, data=wb.Synthetic(samples=16))
    plan = wb.Plan.hybrid(GRAPH, 2)
    assert cluster.verify(wb.Experiment(plan=plan, sync=Same(), **fields), module=NET).exact
    found = cluster.verify(wb.Experiment(plan=plan, sync=Doubled(), **fields), module=NET)
    assert not found.exact


NET = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
GRAPH = wb.trace(NET, input_shape=(1, 8, 8))


@pytest.mark.slow
def test_it_is_trained_resumed_and_loaded(cluster):
    experiment = wb.Experiment(
        plan=wb.Plan.data_parallel(GRAPH, 2),
        data="digits",
        batch_size=64,
        optimizer=wb.SGD(lr=0.05, momentum=0.9),
        steps=12,
        precision="fp64",
        sync=slow_mo(every=4),
        checkpoint_every=4,
    )
    prediction = wb.predict(experiment.plan, None, experiment)
    assert "SlowMo" in str(prediction.program)
    assert "correct" in str(prediction.program)
    straight = cluster.train(experiment, module=NET).wait(LONG_S)
    assert straight.experiment.sync.title == "SlowMo"
    run = cluster.train(experiment.replace(steps=100_000), module=NET)
    run.replan(wb.Plan.hybrid(GRAPH, 2)).wait(LONG_S)
    run.stop()
    run.wait(LONG_S)
    done = int(run.metrics["step"].max())
    run.resume()
    run.replan(experiment.plan).wait(LONG_S)
    run.stop()
    run.wait(LONG_S)
    steps = run.metrics["step"].drop_duplicates().tolist()
    assert len(steps) > done
    assert steps == list(range(len(steps)))
    loaded = wb.Run.load(run.directory)
    assert loaded.experiment.sync.timing == experiment.sync.timing
    assert wb.predict(loaded.experiment.plan, None, loaded.experiment).traffic.collectives
    again = cluster.train(experiment, module=NET).wait(LONG_S)
    for name, tensor in straight.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    losses = straight.metrics.groupby("step")["loss"].first()
    assert losses.iloc[-1] < losses.iloc[0]
