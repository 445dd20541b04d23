"""What one would use instead of the workbench, on one rank.

ddp M               torch's DistributedDataParallel with buckets of M MiB
ddp M fp16          the same with torch's hook that sends fp16
fsdp keep|reshard   torch's fully_shard (FSDP2), a unit for each linear layer; whole weights
                    kept from forward to backward, or gathered again
deepspeed STAGE     DeepSpeed's ZeRO
tensor-parallel K   torch's DTensor tensor parallelism over K ranks for the layers that the
                    plan cuts, and DDP over the others: a 2-D mesh
alone               one engine with its part of the batch, and one process with all of it
independent         every rank trains its own model: no communication at all
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

from workbench.bench.sides import Side, Trainer
from workbench.bench.zero import zero_side
from workbench.comm.groups.world import World
from workbench.plan.experiment import Experiment
from workbench.plan.placement import apportion
from workbench.train.strategies.optimizer import build_optimizer
from workbench.train.verify.reference import whole_model


def build_rival(name: str, experiment: Experiment, world: World, weights: Path) -> list[Side]:
    """The side or sides of this name."""
    module = whole_model(experiment.plan.graph, weights, torch.float32)
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
        case ["alone"]:
            return _alone(experiment, world, module)
        case ["independent"]:
            start, count = _rows(experiment, world)
            trainer = _trainer(experiment, module, start, count)
            return [_side("independent trainers", experiment, world, trainer)]
    raise ValueError(f"there is no rival called {name!r}")


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
    mesh, again = init_device_mesh("cpu", (world.size,)), when == "reshard"
    for linear in [m for m in module.modules() if isinstance(m, nn.Linear)]:
        fully_shard(linear, mesh=mesh, reshard_after_forward=again)
    fully_shard(module, mesh=mesh, reshard_after_forward=again)
    trainer = _trainer(experiment, module, *_rows(experiment, world))
    return _side(f"torch FSDP2, {when}", experiment, world, trainer)


def _tensor_parallel(experiment: Experiment, world: World, module: nn.Module, k: int) -> Side:
    mesh = init_device_mesh("cpu", (world.size // k, k), mesh_dim_names=("data", "tensor"))
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
    """On rank 0; both train one model."""
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
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = build_optimizer(experiment.optimizer, plain)
    if cut:  # which have no fused update, and mix with nothing else
        optimizer.add_param_group({"params": cut, "fused": False, "foreach": True})
    return Trainer(experiment, model, optimizer, start, count)


def _side(name: str, experiment: Experiment, world: World, trainer: Trainer) -> Side:
    return Side(name, lambda i: trainer.step(i) / world.size, experiment.batch_size)
