"""The systems that `bench splitbrain` compares, on one rank, each as a step to be called.

    ddp M               torch's DistributedDataParallel with buckets of M MiB
    ddp M fp16          the same with torch's hook that sends fp16
    fsdp keep|reshard   torch's fully_shard (FSDP2), a unit for each linear layer; whole weights
                        kept from forward to backward, or gathered again
    deepspeed STAGE     DeepSpeed's ZeRO, where it is installed (extra `bench`)
    tensor-parallel K   torch's DTensor tensor parallelism over K ranks for the layers that the
                        plan cuts, and DDP over the others: a 2-D mesh
    language [sequence] the same over all ranks for `nets.GPT`, the loss over the cut vocabulary;
                        "sequence": norms over cut sequences (`language.py`)
    alone               one engine with its part of the batch, and one process with all of it
    independent         every rank trains its own model: no communication at all

All of them start from the same weights, read the same rows of the same batches in the same
order, and use the same optimizer, fused where the system can; each rank computes with one
thread, except for the one process that has the threads of all of them.

On CPU DeepSpeed communicates through gloo and through shared memory of its own, whose code it
compiles at its first start: some minutes, once for each user, with a C++ compiler.

Source of ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054.
"""

import logging
import os
from collections.abc import Callable
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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

from workbench.bench.rivals.language import language_model
from workbench.comm.groups.world import World
from workbench.layers.cut_model import RankGroups
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.placement.placement import apportion
from workbench.train.data.datasets import open_for
from workbench.train.data.feed import moved, rows_of_step
from workbench.train.optimizer.state import build_optimizer
from workbench.train.run.loop import agree
from workbench.train.run.rank import RankState, group_specs_of
from workbench.train.verify.whole_model import whole_model


@dataclass(frozen=True)
class Side:
    """One system on one rank.

    Attributes:
        name: the name of the system.
        step: a function that runs one step and returns this rank's part of the mean loss.
        samples: the samples of one step, over all ranks that take part.
        takes_part: whether this rank takes part.
        threads: the number of threads that it computes with.
        rest: a function that waits until none of its messages is in flight.
    """

    name: str
    step: Callable[[int], float]
    samples: int
    takes_part: bool = True
    threads: int = 1
    rest: Callable[[], None] = lambda: None


def workbench_side(experiment: Experiment, world: World, groups: RankGroups, weights: Path) -> Side:
    """The cut model, as `train` runs it: status of all ranks included."""
    state = RankState.start(experiment, world, groups, weights, None)

    def step(index: int) -> float:
        result = state.stepper.run(index)
        agree(state.everyone, result.loss, False, result.blocked_s)
        state.stepper.update()
        return result.loss

    return Side("workbench", step, experiment.batch_size, rest=state.strategy.rest)


class Trainer:
    """Trains a model by hand on a span of each batch's rows.

    Args:
        experiment: the experiment to run.
        model: the model, whole or in the wrapper of a rival, on the device that it computes on.
        optimizer: the optimizer of its parameters.
        start, count: the first of this rank's rows in a batch, and their number.
    """

    def __init__(
        self,
        experiment: Experiment,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        start: int,
        count: int,
    ) -> None:
        graph = experiment.plan.graph
        self.experiment, self.model, self.optimizer = experiment, model, optimizer
        self.start, self.count = start, count
        self.data = open_for(graph, experiment.data, "train")
        self.device = next(parameter.device for parameter in model.parameters())

    def step(self, index: int) -> float:
        """Runs one step; returns the mean loss of these rows."""
        experiment = self.experiment
        order = rows_of_step(len(self.data), experiment.batch_size, experiment.seed, index)
        batch = self.data.batch(order[self.start : self.start + self.count])
        inputs, labels = moved(batch, self.device, torch.float32)
        scores = self.model(*inputs)
        loss: Tensor = F.cross_entropy(scores.flatten(0, -2), labels.flatten())
        self.learn(loss)
        return loss.item()

    def learn(self, loss: Tensor) -> None:
        """Runs the backward pass, and updates."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


class CutLossTrainer(Trainer):
    """Trains a model whose scores are cut by the vocabulary, on every row, on all ranks alike."""

    def __init__(
        self,
        experiment: Experiment,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        super().__init__(experiment, model, optimizer, 0, experiment.batch_size)

    def step(self, index: int) -> float:
        with loss_parallel():
            return super().step(index)


def whole_machine(threads: int) -> Callable[[], None]:
    """Gives this process `threads` threads and every core; returns a function that undoes it."""
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    if threads > 1:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        torch.set_num_threads(threads)

    def back() -> None:
        os.sched_setaffinity(0, before[1])
        torch.set_num_threads(before[0])

    return back


def build_rival(name: str, experiment: Experiment, world: World, weights: Path) -> list[Side]:
    """Builds the system or systems of this name.

    Raises:
        ValueError: there is no rival of this name.
    """
    module = whole_model(experiment.plan.graph, weights, torch.float32).to(world.device)
    match name.split():
        case ["ddp", mib]:
            return [_ddp(experiment, world, module, float(mib))]
        case ["ddp", mib, "fp16"]:
            return [_ddp_fp16(experiment, world, module, float(mib))]
        case ["fsdp", when]:
            return [_fsdp(experiment, world, module, when)]
        case ["deepspeed", stage]:
            start, count = _rows(experiment, world)
            return [zero_side(experiment, world, module, int(stage), start, count)]
        case ["tensor-parallel", ranks]:
            return [_tensor_parallel(experiment, world, module, int(ranks))]
        case ["language", *more]:
            parted = language_model(module, world.size, sequence=bool(more))
            taught = CutLossTrainer(experiment, parted, _optimizer(experiment, parted))
            end = " + sequence" if more else ""
            return [_side(f"torch TP{end}, {world.size}", experiment, world, taught)]
        case ["divided"]:
            return [_divided(experiment, world, weights)]
        case ["alone"]:
            return _alone(experiment, world, module)
        case ["independent"]:
            start, count = _rows(experiment, world)
            trainer = _trainer(experiment, module, start, count)
            return [_side("independent trainers", experiment, world, trainer)]
    raise ValueError(f"there is no rival called {name!r}")


def _divided(experiment: Experiment, world: World, weights: Path) -> Side:
    own = experiment.replace(plan=experiment.plan.with_shard_tokens())
    side = workbench_side(own, world, world.groups(group_specs_of(own.plan)), weights)
    return replace(side, name="workbench, tokens divided")


def _ddp(experiment: Experiment, world: World, module: nn.Module, mib: float) -> Side:
    model = _replicated(module, bucket_cap_mb=mib)
    trainer = _trainer(experiment, model, *_rows(experiment, world))
    return _side(f"torch DDP, {mib:g} MiB", experiment, world, trainer)


def _ddp_fp16(experiment: Experiment, world: World, module: nn.Module, mib: float) -> Side:
    model = _replicated(module, bucket_cap_mb=mib)
    assert isinstance(model, DistributedDataParallel)
    model.register_comm_hook(None, fp16_compress_hook)
    trainer = _trainer(experiment, model, *_rows(experiment, world))
    return _side(f"torch DDP + fp16 hook, {mib:g} MiB", experiment, world, trainer)


def _fsdp(experiment: Experiment, world: World, module: nn.Module, when: str) -> Side:
    mesh, again = init_device_mesh(world.device.type, (world.size,)), when == "reshard"
    for linear in [m for m in module.modules() if isinstance(m, nn.Linear)]:
        fully_shard(linear, mesh=mesh, reshard_after_forward=again)
    fully_shard(module, mesh=mesh, reshard_after_forward=again)
    trainer = _trainer(experiment, module, *_rows(experiment, world))
    return _side(f"torch FSDP2, {when}", experiment, world, trainer)


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
    trainer = _trainer(experiment, module, world.rank // k * count, count)
    return _side(f"torch DDP x TP, {world.size // k} x {k}", experiment, world, trainer)


def _alone(experiment: Experiment, world: World, module: nn.Module) -> list[Side]:
    """One engine and one process, on rank 0; both train one model."""
    part = experiment.batch_size // world.size
    names = ("one engine", "one process")
    if world.rank:
        return [Side(name, _idle, 0, takes_part=False) for name in names]
    optimizer = build_optimizer(experiment.optimizer, module.parameters())
    engine = Trainer(experiment, module, optimizer, 0, part)
    process = Trainer(experiment, module, optimizer, 0, experiment.batch_size)
    return [
        Side(names[0], engine.step, part),
        Side(names[1], process.step, experiment.batch_size, threads=world.size),
    ]


def _idle(_step: int) -> float:
    return 0.0


def _replicated(module: nn.Module, **options: object) -> nn.Module:
    """DDP with its recommended options; all ranks have read the same weights already."""
    make: Callable[..., nn.Module] = DistributedDataParallel
    fixed = {"gradient_as_bucket_view": True, "static_graph": True, "init_sync": False}
    return make(module, **fixed, **options)


def _rows(experiment: Experiment, world: World) -> tuple[int, int]:
    rows = apportion(experiment.batch_size, (1,) * world.size)
    return sum(rows[: world.rank]), rows[world.rank]


def _trainer(experiment: Experiment, model: nn.Module, start: int, count: int) -> Trainer:
    return Trainer(experiment, model, _optimizer(experiment, model), start, count)


def _optimizer(experiment: Experiment, model: nn.Module) -> torch.optim.Optimizer:
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = build_optimizer(experiment.optimizer, plain)
    if cut:  # which have no fused update, and mix with nothing else
        optimizer.add_param_group({"params": cut, "fused": False, "foreach": True})
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


def zero_side(
    experiment: Experiment, world: World, module: nn.Module, stage: int, start: int, count: int
) -> Side:
    """ZeRO of a stage, on this rank.

    Args:
        experiment: the experiment to run.
        world: the world of this rank.
        module: the whole model.
        stage: the stage: 1 shards the optimizer's state, 2 gradients too, 3 parameters too.
        start: the first of this rank's rows in a batch.
        count: the number of these rows.
    """
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
    trainer = _ZeroTrainer(experiment, engine, engine.optimizer, start, count)
    name = f"DeepSpeed, ZeRO-{stage}"
    return Side(name, lambda i: trainer.step(i) / world.size, experiment.batch_size)


class _ZeroTrainer(Trainer):
    """A trainer whose DeepSpeed engine runs the backward pass and updates."""

    def learn(self, loss: Tensor) -> None:
        engine = cast(Any, self.model)
        engine.backward(loss)
        engine.step()
