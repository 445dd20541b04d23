"""DeepSpeed's ZeRO as a side of `bench splitbrain`, where it is installed (extra `bench`).

On CPU it communicates through gloo and through shared memory of its own, whose code it compiles at
its first start: some minutes, once for each user, with a C++ compiler.

Source: ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054).
"""

import logging
import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

from torch import Tensor, nn

from workbench.bench.sides import Side, Trainer
from workbench.comm.groups.world import World
from workbench.plan.experiment import Experiment
from workbench.train.strategies.optimizer import build_optimizer

# 25 MiB, as DDP's; its own default is a buffer of 2 GB.
BUCKET_ELEMENTS = 25 * 2**20 // 4
MISSING = (
    "DeepSpeed is not installed, so that ZeRO is missing: pip install 'parallel-workbench[bench]'."
)


def is_installed() -> bool:
    """Whether DeepSpeed can be compared with."""
    return find_spec("deepspeed") is not None


def zero_side(
    experiment: Experiment, world: World, module: nn.Module, stage: int, start: int, count: int
) -> Side:
    """ZeRO of a stage, on this rank.

    Args:
        experiment: what runs.
        world: this rank's place.
        module: whole.
        stage: 1 shards the optimizer's state, 2 gradients too, 3 parameters too.
        start: of this rank's rows in a batch.
        count: of them.
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
    """Its engine goes backward and steps."""

    def learn(self, loss: Tensor) -> None:
        engine = cast(Any, self.model)
        engine.backward(loss)
        engine.step()
