"""Predicted peaks beside measured ones, on the same small nets as everything else."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from tests.predict import running
from tests.predict.machines import device, machine
from workbench.bench.harness.nets import Llama
from workbench.client.calibration.devices import with_workspaces
from workbench.comm.shared_memory.meeting import SEGMENT_BYTES
from workbench.layers.local.faster import LARGE_BYTES
from workbench.model.tracing.trace import trace
from workbench.model.vision import torchvision
from workbench.model.weights.initial import initialize
from workbench.plan.collective.codec import Codec
from workbench.plan.experiment.experiment import (
    SGD,
    Adadelta,
    Adam,
    Experiment,
    LocalSGD,
    ParameterServer,
    Pipelined,
    Synchronous,
    Synthetic,
)
from workbench.plan.machine.machine import Machine
from workbench.plan.machine.work import Workspace, takes_workspace, work_of
from workbench.plan.plans.plan import Plan
from workbench.predict.memory.memory import memory_of
from workbench.predict.memory.resident import STAGING_BYTES
from workbench.program.buckets import KEEPS_GRADIENT_BYTES
from workbench.program.step import program_of
from workbench.train.measure.device import workspaces_of

SHAPE = (3, 16, 16)


def convolutions() -> nn.Module:
    """Batch norm, residuals, pools that find maxima, dropout, and a classifier to be cut."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
        nn.Hardswish(),
        nn.Conv2d(64, 64, 1),
        nn.Flatten(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(1024, 512),
        nn.GELU(),
        nn.Linear(512, 10),
    )


def wide() -> nn.Module:
    """Nearly all activations in the tail."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(768, 32), nn.ReLU(), nn.Linear(32, 1024), nn.Tanh(),
        nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 10),
    )  # fmt: skip


def narrow() -> nn.Module:
    """Wide activations, which whoever has nothing of the layers between them does not keep."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(768, 1024), nn.Linear(1024, 8), nn.Sigmoid(), nn.Linear(8, 1024),
        nn.Sigmoid(), nn.Linear(1024, 10),
    )  # fmt: skip


class Attending(nn.Module):
    """Sixteen tokens, four heads, four times over."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(48, 256)
        self.blocks = nn.ModuleList(
            nn.MultiheadAttention(256, 4, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1).unflatten(1, (16, 48)))
        for block in self.blocks:
            x = x + block(x, x, x, need_weights=False)[0]
        return self.head(x[:, 0])


def windows() -> nn.Module:
    """Both versions of attention in windows, shifted and not, of which some tokens are padding."""
    swin = torchvision().models.swin_transformer
    return nn.Sequential(
        nn.Conv2d(3, 64, 1),
        torchvision().ops.Permute([0, 2, 3, 1]),
        swin.ShiftedWindowAttention(64, [5, 5], [0, 0], 4),
        swin.ShiftedWindowAttention(64, [5, 5], [2, 2], 4),
        swin.ShiftedWindowAttentionV2(64, [5, 5], [2, 2], 4),
        nn.Flatten(),
        nn.Linear(64 * 256, 10),
    )


def tuned() -> nn.Module:
    """The classifier of `convolutions` alone is trained, and all norms keep their statistics."""
    net = convolutions()
    net[1].eval()
    for part in net[:8]:
        part.requires_grad_(False)
    return net


def partly() -> nn.Module:
    """Of `convolutions`, what lies before two layers that are frozen is trained."""
    net = convolutions()
    for part in (net[1], net[4], net[8], net[11]):
        part.requires_grad_(False)
    return net


class Language(nn.Module):
    """Tokens of a large vocabulary, whose table also gives their scores."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3000, 32)
        self.block = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))
        self.scores = nn.Linear(32, 3000, bias=False)
        self.scores.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        return self.scores(x + self.block(x))


class Padded(nn.Module):
    """Attention that leaves a token out, and drops weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.attend = nn.MultiheadAttention(64, 4, dropout=0.2, batch_first=True)
        self.scores = nn.Linear(64, 50)

    def forward(self, x: Tensor) -> Tensor:
        padding, x = x == 0, self.table(x)
        return self.scores(x + self.attend(x, x, x, padding, need_weights=False)[0])


NETS = {
    "convolutions": convolutions,
    "wide": wide,
    "attention": Attending,
    "windows": windows,
    "tuned": tuned,
    "partly": partly,
    "language": Language,
    "rotary": lambda: Llama(1, 256, 16, 50),
    "padded": Padded,
    "narrow": narrow,
}


@cache
def graph_of(name):
    if name in ("language", "rotary", "padded"):
        vocabulary = dict(language=3000, rotary=50, padded=50)[name]
        return trace(NETS[name](), input_shape=(16,), vocabulary=vocabulary)
    return trace(NETS[name](), input_shape=SHAPE)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    made = {}
    for name, net in NETS.items():
        made[name] = initialize(graph_of(name), 0, folder / name, module=net())
    return made


def cut_on_one(graph):
    """Of two layers one rank has all."""
    plan = Plan.data_parallel(graph, 2)
    plan = plan.with_layer("2", scheme="shard_out", group_size=2, shares=(1, 0))
    return plan.with_layer("4", scheme="shard_in", group_size=2, shares=(1, 0))


PLANS = {
    "data parallel": lambda g: Plan.data_parallel(g, 2).with_batch_norm("synchronized"),
    "hybrid": lambda g: Plan.hybrid(g, 4),
    "in groups": lambda g: Plan.hybrid(g, 4, 2),
    "unequal": lambda g: Plan.hybrid(g, 2).with_layer("8", shares=(3, 1)),
    "heads": lambda g: Plan.hybrid(g, 2).with_layer("blocks.1", shares=(3, 1)),
    "recomputed": lambda g: Plan.hybrid(g, 2).with_recompute("[0-5]", "9", "1[01]"),
    "recomputed in rounds": lambda g: Plan.hybrid(g, 2, rounds="B").with_recompute("[3-6]"),
    "alone": lambda g: Plan.data_parallel(g, 2),
    "window heads": lambda g: Plan.data_parallel(g, 2).with_layer(
        "3", scheme="shard_heads", shares=(1, 1)
    ),
    "vocabulary": lambda g: Plan.data_parallel(g, 2).with_layer("table", scheme="shard_in"),
    "some of it": lambda g: Plan.data_parallel(g, 3).with_layer(
        "table", scheme="shard_in", shares=(2, 0, 1)
    ),
    "heads and scores": lambda g: Plan.hybrid(g, 2),
    "features": lambda g: Plan.data_parallel(g, 2).with_layer("table", scheme="shard_out"),
    "nothing on one": lambda g: cut_on_one(g),
    "nothing on one, recomputed": lambda g: cut_on_one(g).with_recompute("[2-4]"),
    "B": lambda g: Plan.hybrid(g, 4, rounds="B"),
    "B/K": lambda g: Plan.hybrid(g, 4, rounds="B/K"),
}

STEPPED = dict(optimizer=SGD(lr=0.01, momentum=0.9), steps=3)
FUSED = dict(sync=Synchronous(algorithm="direct"), optimizer=Adam())

CASES = [
    ("convolutions", "data parallel", {}),
    ("convolutions", "hybrid", dict(optimizer=Adam())),
    ("convolutions", "in groups", dict(precision="fp64")),
    ("convolutions", "in groups", dict(accumulate=2)),
    ("convolutions", "in groups", dict(sync=LocalSGD(every=3, momentum="average"))),
    ("convolutions", "unequal", dict(precision="bf16")),
    ("convolutions", "unequal", dict(precision="fp16")),
    ("convolutions", "in groups", FUSED | dict(precision="fp16", shard_optimizer=True)),
    ("tuned", "data parallel", dict(optimizer=Adam())),
    ("tuned", "in groups", dict(precision="bf16")),
    ("partly", "data parallel", {}),
    ("partly", "in groups", dict(optimizer=Adam())),
    ("partly", "in groups", dict(precision="bf16")),
    ("partly", "in groups", dict(precision="fp16", clip_norm=0.1)),
    ("partly", "recomputed", {}),
    ("attention", "data parallel", {}),
    ("attention", "heads", {}),
    ("attention", "data parallel", dict(precision="bf16")),
    ("rotary", "data parallel", {}),
    ("rotary", "heads and scores", {}),
    ("rotary", "heads and scores", dict(precision="bf16")),
    ("padded", "heads and scores", {}),
    ("padded", "heads and scores", dict(precision="bf16")),
    ("convolutions", "recomputed", {}),
    ("convolutions", "data parallel", dict(shard_optimizer=True, optimizer=Adam())),
    ("convolutions", "in groups", FUSED | dict(shard_optimizer=(3, 0, 0, 1))),
    ("convolutions", "data parallel", dict(sync=Synchronous(algorithm="ring"))),
    ("convolutions", "in groups", dict(sync=Pipelined(width=2, compensation="delay"))),
    ("convolutions", "in groups", dict(sync=Pipelined(width=3, codec=Codec(name="int8")))),
    ("convolutions", "in groups", dict(sync=ParameterServer(server=3))),
    (
        "convolutions",
        "in groups",
        dict(optimizer=Adadelta(), shard_optimizer=True, clip_norm=0.1, ema=0.9),
    ),
    ("windows", "alone", dict(batch_size=16)),
    ("windows", "window heads", dict(batch_size=16)),
    ("language", "data parallel", dict(batch_size=32)),
    ("language", "vocabulary", dict(batch_size=32)),
    ("language", "vocabulary", dict(batch_size=32, precision="bf16")),
    ("language", "some of it", dict(batch_size=33, optimizer=Adam())),
    ("language", "features", dict(batch_size=32)),
    ("narrow", "nothing on one", dict(batch_size=1600)),
    ("narrow", "nothing on one, recomputed", dict(batch_size=1600)),
    ("wide", "hybrid", dict(batch_size=1600)),
    ("wide", "recomputed in rounds", dict(batch_size=1600)),
    ("wide", "B", dict(batch_size=1600)),
    ("wide", "B/K", dict(batch_size=1600)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("net", "plan", "fields"), CASES)
def test_peaks_are_the_measured_ones(on_ranks, weights, net, plan, fields):
    given = dict(batch_size=128, optimizer=SGD(lr=0.01, momentum=0.9)) | fields
    chosen = PLANS[plan](graph_of(net))
    run = Experiment(plan=chosen, data=Synthetic(samples=1600), steps=3, **given)
    found = on_ranks.seated(chosen.world_size, running.peak_of_a_step, run, weights[net])
    known, guessed = memory_of(program_of(run), knowing(run)), memory_of(program_of(run))
    assert known.unmeasured == ()
    for rank, other, measured in zip(known.ranks, guessed.ranks, found, strict=True):
        assert rank.peak_bytes == pytest.approx(measured, rel=0.02), (rank.moment, rank.categories)
        assert rank.band == (rank.peak_bytes, rank.peak_bytes)
        least, most = other.band
        assert 0.98 * least <= measured <= 1.02 * most
        assert least <= other.peak_bytes <= most


def knowing(run: Experiment) -> Machine:
    """A machine of this process's device, which knows what its kernels take for an experiment."""
    plan, cpu = run.plan, torch.device("cpu")
    rows = max(plan.rows_of(run.batch_size // run.accumulate))
    found = workspaces_of(plan, range(plan.world_size), [rows], run.precision, cpu)
    own = machine(device())
    return own.replace(devices=with_workspaces(own.devices, [found]))


def test_a_machine_that_has_not_measured_a_shape_says_so():
    """Nor does it know of more rows than it has measured, or of another precision."""
    plan = Plan.data_parallel(graph_of("convolutions"), 2)
    run = Experiment(plan=plan, data=Synthetic(samples=64), batch_size=32, **STEPPED)
    known = knowing(run)
    convolutions = tuple(layer.name for layer in plan.graph.layers if layer.kind == "conv2d")
    assert memory_of(program_of(run), known).unmeasured == ()
    for other in (run.replace(batch_size=64), run.replace(precision="bf16")):
        guessed = memory_of(program_of(other), known)
        assert set(guessed.unmeasured) == set(convolutions)
        least, most = guessed.band
        assert least <= guessed.peak_bytes <= most
    assert memory_of(program_of(run)).to_frame()["most_bytes"][0] > 0


def test_without_convolutions_no_machine_is_needed():
    plan = Plan.hybrid(graph_of("wide"), 4)
    run = Experiment(plan=plan, data=Synthetic(samples=64), batch_size=32, **STEPPED)
    memory = memory_of(program_of(run))
    assert memory.unmeasured == ()
    assert memory.band == (memory.peak_bytes, memory.peak_bytes)


def test_sizes_are_those_of_the_implementation():
    """Rooms that never see each other state them twice."""
    assert STAGING_BYTES == SEGMENT_BYTES
    assert KEEPS_GRADIENT_BYTES == LARGE_BYTES


def test_ranks_on_one_gpu_share_its_memory_and_those_with_their_own_do_not():
    plan = Plan.data_parallel(graph_of("convolutions"), 2)
    run = Experiment(plan=plan, data=Synthetic(samples=64), batch_size=32, **STEPPED)

    def rank_on(**fields):
        return memory_of(program_of(run), machine(device(**fields)))[0]

    on_cpu, kept = rank_on(), 1000
    on_one = rank_on(kind="cuda", sharers=2, library_bytes=kept)
    alone = rank_on(kind="cuda", library_bytes=kept)
    shared = on_cpu.held["staging", "staging"] + on_cpu.held["buckets", "sums of gradients"]
    assert on_one.peak_bytes == on_cpu.peak_bytes + kept
    assert alone.peak_bytes == on_one.peak_bytes - shared
    assert alone.held["workspace", "libraries"] == kept


def test_on_a_gpu_the_gradient_of_a_bias_takes_room_for_the_parts_of_its_sum():
    plan = Plan.data_parallel(graph_of("wide"), 2)
    run = Experiment(plan=plan, data=Synthetic(samples=64), batch_size=32, **STEPPED)
    last = [layer for layer in plan.graph.layers if layer.kind == "linear"][-1]
    parts = 2**30

    def predicted(workspaces=()):
        gpu = device(kind="cuda", sharers=2, workspaces=workspaces)
        return memory_of(program_of(run), machine(gpu))

    unknown, works = (
        predicted(),
        [
            work_of(plan, layer, 0, (16, 16), "fp32")
            for layer in plan.graph.layers
            if takes_workspace(layer, "cuda")
        ],
    )
    least, most = unknown.band
    assert last.name in unknown.unmeasured
    assert least <= unknown.peak_bytes < most

    def found_of(last):
        return [
            Workspace(key=work.key, precision="fp32", points=((16, 0, 0, size),))
            for work in works
            for size in [last if work.key == works[-1].key else 0]
        ]

    def known(of_last):
        return predicted(found_of(of_last))

    mixed = memory_of(
        program_of(run), machine(device(kind="cuda", workspaces=found_of(0)), device())
    )
    assert mixed.unmeasured == ()
    none, some = known(0), known(parts)
    assert none.unmeasured == some.unmeasured == ()
    assert none.peak_bytes == unknown.peak_bytes
    assert some[0].held["workspace", last.name] == parts
    assert some[0].held["gradients", last.name] >= last.weights[0].numel * 4, (
        "these are made before"
    )
    assert some[0].moment.layer == last.name


def test_a_frozen_bias_takes_no_room_for_its_sum():
    plan = Plan.data_parallel(trace(frozen_bias(), input_shape=(8,)), 1)
    run = Experiment(plan=plan, data=Synthetic(samples=64), batch_size=32, **STEPPED)
    memory = memory_of(program_of(run), machine(device(kind="cuda")))
    assert memory.unmeasured == ()


def frozen_bias():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    for layer in net:
        layer.bias.requires_grad_(False)
    return net
