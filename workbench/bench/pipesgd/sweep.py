"""Part of `bench pipesgd`: the gain of a pipeline when communication takes r times the compute.

The link's bandwidth is chosen for each r from constants that are measured first. On it,
interleaved:

    compute     steps without exchange: l_up + l_comp
    exchange    nothing but the all-reduce: l_comm
    D-Sync      both, one after the other
    K = 2 ..    Pipe-SGD of width K

so that the gain of a round is compared with the bound by that round's own r.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from workbench.bench.nets import INPUT_SHAPE, SmallVGG
from workbench.bench.progress import Progress
from workbench.bench.report import Cell, Figure
from workbench.bench.rivals.turns import Seen, Turn
from workbench.client.cluster import Cluster
from workbench.hosts.emulated.hosts import Hosts
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, LocalSGD, Pipelined, Synthetic
from workbench.plan.plans.plan import Plan
from workbench.predict.closed_form import (
    ONCE,
    Compute,
    Fit,
    TimingModel,
    fit,
    gain_bound,
)

ENGINES = 4
QUEUE_S = 0.01  # of a link: so long does a small message wait behind gradients at most
FIRST_RATE = 25e6  # bytes/s
SIZES = (2**12, 2**17, 2**19, 2**20, 2**21)
COMPUTE = Turn("compute", LocalSGD(every=10**6), warm=1, steps=3)
EXCHANGE = Turn("exchange", ONCE, warm=1, steps=2, alone=True)
D_SYNC = Turn("D-Sync", ONCE, warm=1, steps=2)


@dataclass(frozen=True)
class Sweep:
    """The settings of the sweep.

    Attributes:
        ratios: the values of r.
        wide_at: the r at which widths above 2 run too.
        rounds: the number of rounds for every r.
        rows: the rows of each rank in a step, which determine the compute time.
        width: the channels of the `SmallVGG`'s first stage.
    """

    ratios: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    wide_at: float = 1.0
    rounds: int = 5
    rows: int = 96
    width: int = 16


QUICK = Sweep(ratios=(1.0,), rounds=1, rows=16, width=8)


@dataclass(frozen=True)
class Swept:
    """The rows and figures of the sweep, and the constants by which bandwidths were chosen."""

    rows: list[dict[str, Cell]]
    figures: dict[str, Figure]
    constants: Fit


def run(progress: Progress, sweep: Sweep) -> Iterator[Swept]:
    """Measures constants and compute, then every r on hosts with the link for it."""
    module = SmallVGG(width=sweep.width)
    experiment = Experiment(
        plan=Plan.data_parallel(trace(module, input_shape=INPUT_SHAPE), ENGINES),
        data=Synthetic(samples=512),
        batch_size=ENGINES * sweep.rows,
        optimizer=SGD(lr=0.01, momentum=0.9),
        steps=1,
    )
    with _hosts(FIRST_RATE) as hosts, Cluster(ENGINES, hosts=hosts, timeout=120.0) as cluster:
        constants = measured_constants(cluster, experiment, module)
        found = take_turns(cluster, experiment, module, (COMPUTE,), 2)
    compute_s = statistics.median(found[0]["compute"].seconds)
    model = TimingModel(
        ENGINES,
        4 * experiment.plan.graph.parameters,
        Compute(update_s=0.0, forward_s=0.0, backward_s=compute_s),
        constants.network,
    )
    payload = constants.network.bandwidth / FIRST_RATE  # headers take the rest
    rows: list[dict[str, Cell]] = []
    figures: dict[str, Figure] = {}
    for r in progress.each("sweep", sweep.ratios):
        rate = model.bandwidth_for(r) / payload
        widths = (2, 3, 4) if r == sweep.wide_at else (2,)
        with _hosts(rate) as hosts, Cluster(ENGINES, hosts=hosts, timeout=120.0) as cluster:
            turns = (COMPUTE, EXCHANGE, D_SYNC, *map(_pipelined, widths))
            found = take_turns(
                cluster, experiment, module, turns, progress.fitting(sweep.rounds, 1)
            )
        seen = {name: one.seconds for name, one in found[0].items()}
        rows += _rows(r, rate, seen)
        figures |= _figures(r, seen)
        yield Swept(rows, figures, constants)


def measured_constants(
    cluster: Cluster, experiment: Experiment, module: nn.Module | None, times: int = 3
) -> Fit:
    """α, β and S of a cluster's links from exchanges, γ from additions."""
    found = cluster.call(
        "workbench.bench.collectives.timing:measure",
        experiment,
        module=module,
        sizes=SIZES,
        algorithms=("ring", "direct"),
        times=times,
    )
    addition = max(gamma for _, gamma in found)
    return fit(found[0][0], held={"reduction_s_per_byte": addition})


def take_turns(
    cluster: Cluster,
    experiment: Experiment,
    module: nn.Module | None,
    turns: Sequence[Turn],
    rounds: int,
) -> list[dict[str, Seen]]:
    """Runs the systems in turns; the measurements of each rank, by system."""
    found: list[dict[str, Seen]] = cluster.call(
        "workbench.bench.rivals.turns:measure",
        experiment,
        module=module,
        turns=turns,
        rounds=rounds,
    )
    return found


def _hosts(rate: float) -> Hosts:
    return Hosts(ENGINES, bandwidth=rate, queue_limit_s=QUEUE_S)


def _pipelined(width: int) -> Turn:
    return Turn(f"Pipe-SGD, K={width}", Pipelined(width=width, algorithm="ring"), width, 3)


def _rows(r: float, rate: float, seen: dict[str, list[float]]) -> list[dict[str, Cell]]:
    compute, exchange = (statistics.median(seen[name]) for name in ("compute", "exchange"))
    models = {"compute": compute, "exchange": exchange, "D-Sync": compute + exchange}
    return [
        {
            "r": f"{r:g}",
            "link, Mbit/s": 8 * rate / 1e6,
            "system": name,
            "ms of a step": 1e3 * statistics.median(seconds),
            "min": 1e3 * min(seconds),
            "max": 1e3 * max(seconds),
            "model": 1e3 * models.get(name, max(compute, exchange)),
        }
        for name, seconds in seen.items()
    ]


def _figures(r: float, seen: dict[str, list[float]]) -> dict[str, Figure]:
    """The figures, as ratios of one round each; gains also over the bound by that round's own r."""
    pairs = list(zip(seen["compute"], seen["exchange"], strict=True))
    pipe = seen["Pipe-SGD, K=2"]
    gains = [a / b for a, b in zip(seen["D-Sync"], pipe, strict=True)]
    bounds = [gain_bound(exchange / compute) for compute, exchange in pairs]
    models = [max(pair) for pair in pairs]
    figures = {
        f"r_measured_{r:g}": [exchange / compute for compute, exchange in pairs],
        f"pipe_vs_dsync_r{r:g}": gains,
        f"gain_vs_bound_r{r:g}": [a / b for a, b in zip(gains, bounds, strict=True)],
        f"iteration_vs_model_r{r:g}": [a / b for a, b in zip(pipe, models, strict=True)],
    }
    for width in (3, 4):
        if (wide := seen.get(f"Pipe-SGD, K={width}")) is not None:
            ratios = [a / b for a, b in zip(pipe, wide, strict=True)]
            figures[f"width{width}_vs_width2"] = ratios
    return {name: Figure.of(values) for name, values in figures.items()}
