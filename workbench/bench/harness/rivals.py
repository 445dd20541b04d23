"""The systems that benchmarks compare, on one rank, each as a step to be called.

    ddp M               torch's DistributedDataParallel with buckets of M MiB
    ddp M fp16          the same with torch's hook that sends fp16
    fsdp keep|reshard   torch's fully_shard (FSDP2), a unit for each linear layer; whole weights
                        kept from forward to backward, or gathered again
    deepspeed STAGE     DeepSpeed's ZeRO, where it is installed (extra `bench`)
    tensor-parallel K   torch's DTensor tensor parallelism over K ranks for the layers that the
                        plan shards, and DDP over the others: a 2-D mesh
    language            the same over all ranks for `nets.GPT`, as torch's own tutorial has it:
                        attention by heads, MLPs in pairs of columns and rows, the table of tokens
                        by its rows, and the loss over scores that are sharded by the vocabulary
    language sequence   where nothing is sharded, every rank has some tokens of each sequence: an
                        all-reduce becomes a reduce-scatter and an all-gather
    divided             the workbench itself with tokens divided
    alone               one engine with its part of the batch, and one process with all of it
    independent         every rank trains its own model: no communication at all

All of them start from the same weights, read the same rows of the same batches in the same
order, and use the same optimizer, fused where the system can; each rank computes with one
thread, except for the one process that has the threads of all of them.

On CPU DeepSpeed communicates through gloo and through shared memory of its own, whose code it
compiles at its first start: some minutes, once for each user, with a C++ compiler.

Sources: ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054; sequence parallelism: Korthikanti et al.
2022, arXiv:2205.05198.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as DTensorShard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

from workbench.comm.groups.group import Group
from workbench.comm.groups.world import World
from workbench.comm.regions import exchange, gather_from
from workbench.layers.cut_model import RankGroups
from workbench.layers.local.loss import cross_entropy_sum, cut_cross_entropy_sum
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.placement.placement import Shard, apportion
from workbench.train.data.datasets import open_for
from workbench.train.data.feed import moved, rows_of_step
from workbench.train.optimizer.state import build_optimizer
from workbench.train.run.loop import agree
from workbench.train.run.rank import RankState, group_specs_of
from workbench.train.verify.whole_model import whole_model


@dataclass(frozen=True)
class Side:
    """One system on one rank.

    `step` returns this rank's part of the mean loss, `samples` are those of one step over all ranks
    that take part, and `rest` waits until none of its messages is in flight.
    """

    name: str
    step: Callable[[int], float]
    samples: int
    takes_part: bool = True
    threads: int = 1
    rest: Callable[[], None] = lambda: None

    @contextmanager
    def threads_of_all(self) -> Iterator[None]:
        """Gives this process all cores and threads for a while, if the system has several."""
        threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
        if self.threads > 1:
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
            torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            os.sched_setaffinity(0, cores)
            torch.set_num_threads(threads)


def workbench_side(experiment: Experiment, world: World, groups: RankGroups, weights: Path) -> Side:
    """The sharded model, as `train` runs it: status of all ranks included."""
    state = RankState.start(experiment, world, groups, weights, None)

    def step(index: int) -> float:
        result = state.stepper.run(index)
        agree(state.everyone, result.loss, False, result.blocked_s)
        state.stepper.update()
        return result.loss

    return Side("workbench", step, experiment.batch_size, rest=state.strategy.rest)


class Trainer:
    """Trains a model by hand on `count` rows of each batch, from `start` on.

    `model` is whole or in the wrapper of a rival; with `sharded_loss`, its scores are DTensors,
    sharded by the vocabulary, and all ranks have all rows.
    """

    def __init__(
        self,
        experiment: Experiment,
        model: nn.Module,
        start: int,
        count: int,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        sharded_loss: bool = False,
    ) -> None:
        self.experiment, self.model = experiment, model
        self.optimizer = optimizer or _optimizer(experiment, model)
        self.start, self.count, self.sharded_loss = start, count, sharded_loss
        self.data = open_for(experiment.plan.graph, experiment.data, "train")
        self.device = next(parameter.device for parameter in model.parameters())

    def step(self, index: int) -> float:
        """Runs one step; returns the mean loss of these rows."""
        experiment = self.experiment
        order = rows_of_step(len(self.data), experiment.batch_size, experiment.seed, index)
        batch = self.data.batch(order[self.start : self.start + self.count])
        inputs, labels = moved(batch, self.device, torch.float32)
        with loss_parallel() if self.sharded_loss else nullcontext():
            scores = self.model(*inputs)
            loss: Tensor = F.cross_entropy(scores.flatten(0, -2), labels.flatten())
            self.learn(loss)
        return loss.item()

    def learn(self, loss: Tensor) -> None:
        """Runs the backward pass, and updates."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


class _ZeroTrainer(Trainer):
    """A trainer whose DeepSpeed engine runs the backward pass and updates."""

    def learn(self, loss: Tensor) -> None:
        engine = cast(Any, self.model)
        engine.backward(loss)
        engine.step()


def build_rival(name: str, experiment: Experiment, world: World, weights: Path) -> list[Side]:
    """Builds the system or systems of this name.

    Raises:
        ValueError: there is no rival of this name.
    """
    module = whole_model(experiment.plan.graph, weights, torch.float32).to(world.device)
    start, count = _rows(experiment, world)

    def side(title: str, model: nn.Module) -> list[Side]:
        return [_side(title, experiment, world, Trainer(experiment, model, start, count))]

    match name.split():
        case ["ddp", mib]:
            return side(f"torch DDP, {mib} MiB", _replicated(module, bucket_cap_mb=float(mib)))
        case ["ddp", mib, "fp16"]:
            replicated = _replicated(module, bucket_cap_mb=float(mib))
            replicated.register_comm_hook(None, fp16_compress_hook)
            return side(f"torch DDP + fp16 hook, {mib} MiB", replicated)
        case ["fsdp", when]:
            mesh, again = init_device_mesh(world.device.type, (world.size,)), when == "reshard"
            for linear in [m for m in module.modules() if isinstance(m, nn.Linear)]:
                fully_shard(linear, mesh=mesh, reshard_after_forward=again)
            fully_shard(module, mesh=mesh, reshard_after_forward=again)
            return side(f"torch FSDP2, {when}", module)
        case ["deepspeed", stage]:
            return [_zero(experiment, world, module, int(stage), start, count)]
        case ["tensor-parallel", ranks]:
            return [_tensor_parallel(experiment, world, module, int(ranks))]
        case ["language", *sequence]:
            model = _language_model(module, world, sequence=bool(sequence))
            trainer = Trainer(experiment, model, 0, experiment.batch_size, sharded_loss=True)
            end = " + sequence" if sequence else ""
            return [_side(f"torch TP{end}, {world.size}", experiment, world, trainer)]
        case ["divided"]:
            own = experiment.replace(plan=experiment.plan.with_shard_tokens())
            groups = world.groups(group_specs_of(own.plan))
            divided = workbench_side(own, world, groups, weights)
            return [replace(divided, name="workbench, tokens divided")]
        case ["alone"]:
            return _alone(experiment, world, module)
        case ["independent"]:
            return side("independent trainers", module)
    raise ValueError(f"there is no rival called {name!r}")


def _tensor_parallel(experiment: Experiment, world: World, module: nn.Module, k: int) -> Side:
    sizes, names = (world.size // k, k), ("data", "tensor")
    mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=names)
    styles: dict[str, ParallelStyle] = {
        name: ColwiseParallel() if choice.scheme == "shard_out" else RowwiseParallel()
        for name, choice in experiment.plan.layers.items()
        if choice.scheme in ("shard_out", "shard_in")
    }
    for m in module.modules():
        if isinstance(m, nn.ReLU):
            m.inplace = False  # DTensor's outputs are views, which refuse it
    parallelize_module(module, mesh["tensor"], styles)
    if world.size > k:
        _pre_dp_module_transform(module)
        module = _replicated(module, process_group=mesh["data"].get_group())
    count = experiment.batch_size // (world.size // k)
    trainer = Trainer(experiment, module, world.rank // k * count, count)
    return _side(f"torch DDP x TP, {world.size // k} x {k}", experiment, world, trainer)


def _language_model(module: nn.Module, world: World, *, sequence: bool) -> nn.Module:
    """`nets.GPT`, sharded over all ranks; with `sequence`, norms read some of the tokens."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    tokens = DTensorShard(1)
    between = tokens if sequence else Replicate()
    styles: dict[str, ParallelStyle] = {
        "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, use_local_output=False),
    }
    for name, _ in module.get_submodule("blocks").named_children():
        block = f"blocks.{name}"
        styles |= {f"{block}.attention.{part}": ColwiseParallel() for part in "qkv"}
        styles[f"{block}.attention.o"] = RowwiseParallel(output_layouts=between)
        styles[f"{block}.up"] = ColwiseParallel(input_layouts=between)
        styles[f"{block}.down"] = RowwiseParallel(output_layouts=between)
        if sequence:
            styles[f"{block}.attention"] = PrepareModuleInput(
                input_layouts=(tokens,), desired_input_layouts=(Replicate(),)
            )
            styles |= {f"{block}.{norm}": SequenceParallel() for norm in ("before", "between")}
    if sequence:
        styles["norm"] = SequenceParallel()
    return parallelize_module(module, mesh, styles)


def _alone(experiment: Experiment, world: World, module: nn.Module) -> list[Side]:
    """One engine and one process, on rank 0; both train one model."""
    part = experiment.batch_size // world.size
    names = ("one engine", "one process")
    if world.rank:
        return [Side(name, lambda _: 0.0, 0, takes_part=False) for name in names]
    optimizer = build_optimizer(experiment.optimizer, module.parameters())
    engine = Trainer(experiment, module, 0, part, optimizer)
    process = Trainer(experiment, module, 0, experiment.batch_size, optimizer)
    return [
        Side(names[0], engine.step, part),
        Side(names[1], process.step, experiment.batch_size, threads=world.size),
    ]


def _replicated(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """DDP with its recommended options; all ranks have read the same weights already."""
    options |= {"gradient_as_bucket_view": True, "static_graph": True, "init_sync": False}
    return DistributedDataParallel(module, **options)


def _rows(experiment: Experiment, world: World) -> tuple[int, int]:
    rows = apportion(experiment.batch_size, (1,) * world.size)
    return sum(rows[: world.rank]), rows[world.rank]


def _optimizer(experiment: Experiment, model: nn.Module) -> torch.optim.Optimizer:
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = build_optimizer(experiment.optimizer, plain)
    if sharded:  # which have no fused update, and mix with nothing else
        optimizer.add_param_group({"params": sharded, "fused": False, "foreach": True})
    return optimizer


def _side(name: str, experiment: Experiment, world: World, trainer: Trainer) -> Side:
    return Side(name, lambda i: trainer.step(i) / world.size, experiment.batch_size)


# 25 MiB, as for DDP; its own default is a buffer of 2 GB.
BUCKET_ELEMENTS = 25 * 2**20 // 4
ZERO_MISSING = (
    "DeepSpeed is not installed, so that ZeRO is missing: pip install 'parallel-workbench[bench]'."
)


def zero_is_installed() -> bool:
    """Whether DeepSpeed is installed, for a comparison."""
    return find_spec("deepspeed") is not None


def _zero(
    experiment: Experiment, world: World, module: nn.Module, stage: int, start: int, count: int
) -> Side:
    """ZeRO: stage 1 shards the optimizer's state, 2 gradients too, 3 parameters too."""
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    os.environ.setdefault("LOCAL_RANK", str(world.rank))
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    engine, *_ = import_module("deepspeed").initialize(
        model=module,
        optimizer=build_optimizer(experiment.optimizer, module.parameters()),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": count,
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": BUCKET_ELEMENTS,
                "allgather_bucket_size": BUCKET_ELEMENTS,
            },
            "zero_allow_untested_optimizer": True,
        },
    )
    trainer = _ZeroTrainer(experiment, engine, start, count, engine.optimizer)
    return _side(f"DeepSpeed, ZeRO-{stage}", experiment, world, trainer)


LOSSES = ("workbench", "scores gathered", "scores by rows", "torch loss_parallel")
"""Ways to the cross-entropy of scores that are sharded by classes.

    workbench             over the sharded scores: a few numbers for each label travel
    scores gathered       every rank gets the scores of all classes of all rows
    scores by rows        every rank gets the scores of all classes of its own rows, and its
                          gradient goes back: two all-to-alls
    torch loss_parallel   DTensor's, over the sharded scores
"""


def loss_side(name: str, experiment: Experiment, world: World, group: Group) -> Side:
    """One way to the loss, on this rank, at the sizes of the experiment's language model.

    A step is the forward and the backward pass, from scores that are drawn to their gradient.
    """
    graph = experiment.plan.graph
    tokens, extent = graph[graph.outputs[0]].output_shape
    num_labels = experiment.batch_size * tokens
    even = (1,) * group.size
    classes = Shard(1, apportion(extent, even))
    rows = Shard(0, apportion(num_labels, even))
    generator = torch.Generator().manual_seed(experiment.seed)  # the same on all ranks
    labels = torch.randint(extent, (num_labels,), generator=generator).to(world.device)
    generator.manual_seed(experiment.seed + 1 + world.rank)
    held = classes.sizes[world.rank]
    mine = torch.randn(num_labels, held, generator=generator).to(world.device).requires_grad_()

    def parallel() -> Tensor:
        scores = DTensor.from_local(mine, mesh, [DTensorShard(1)], run_check=False)
        return F.cross_entropy(scores, labels, reduction="sum") / group.size

    def loss_of() -> Tensor:
        match name:
            case "workbench":
                return cut_cross_entropy_sum(mine, labels, classes, group) / group.size
            case "scores gathered":
                return cross_entropy_sum(gather_from(mine, classes, group), labels) / group.size
            case "scores by rows":
                own = labels.narrow(0, *rows.span(group.rank))
                return cross_entropy_sum(exchange(mine, classes, rows, group), own)
        return parallel()

    def step(_index: int) -> float:
        mine.grad = None
        with loss_parallel() if in_torch else nullcontext():
            loss = loss_of() / num_labels
            loss.backward()
            return loss.item()

    in_torch = name == "torch loss_parallel"
    mesh = init_device_mesh(world.device.type, (world.size,)) if in_torch else None
    return Side(name, step, num_labels)
