"""A plan as torch's own objects: for `parallelize_module` (DTensor) and `fully_shard` (FSDP2)."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from workbench.plan.io.errors import PlanError
from workbench.plan.plans.module_plan import ModulePlan, ModuleStyle
from workbench.plan.plans.plan import Plan

_PLACEMENTS = {"rows": Shard(0), "features": Shard(-1)}


def to_dtensor(plan: Plan | ModulePlan) -> dict[str, ParallelStyle]:
    """What `torch.distributed.tensor.parallel.parallelize_module` takes as its plan.

        mesh = init_device_mesh("cuda", plan.module_plan().mesh_shape, mesh_dim_names=("dp", "tp"))
        parallelize_module(module, mesh["tp"], wb.to_dtensor(plan))

    Every rank gives the module its own rows, equally many, and gets their outputs. Gradients are
    sums over the group's rows for `module_plan().sharded`; over the rank's own for `.replicated`,
    which torch does not sum by itself. Random layers draw as torch does, not as this library.

    Args:
        plan: the plan, with a linear layer that is split, or what its `module_plan()` gives.

    Raises:
        PlanError: nothing is split; or torch has no words for it, as the text says.
    """
    told = _module_plan(plan)
    if not told.styles:
        raise PlanError(
            f"no layer of {told.model} is split: to_fsdp(plan) is for data parallel plans, and "
            "Plan.hybrid(graph, world_size) splits linear layers"
        )
    return {name: _style(how) for name, how in told.styles.items()}


@dataclass(frozen=True)
class FullyShard:
    """How `torch.distributed.fsdp.fully_shard` is called for a model.

    Attributes:
        modules: the paths of modules that it is called for one by one; the model comes last.
        world_size: the number of ranks.
        reshard_after_forward: torch's option. False, as here: whole parameters stay until the
            backward pass has used them, so that they travel once, as in ZeRO-1 and -2.
    """

    modules: tuple[str, ...]
    world_size: int
    reshard_after_forward: bool = False

    def apply(self, module: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
        """Shards a module's parameters, gradients and optimizer state, in place.

        Args:
            module: the model that the plan was made for.
            mesh: the ranks; None: all of the default process group.

        Raises:
            PlanError: the mesh has another number of ranks than the plan.
        """
        if mesh is not None and mesh.size() != self.world_size:
            raise PlanError(f"the plan is for {self.world_size} ranks, the mesh has {mesh.size()}")
        for one in (*map(module.get_submodule, self.modules), module):
            fully_shard(one, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
        return module


def to_fsdp(plan: Plan | ModulePlan) -> FullyShard:
    """How FSDP2 runs a data parallel plan, with a sharded optimizer.

        wb.to_fsdp(plan).apply(module)
        optimizer = torch.optim.AdamW(module.parameters())

    Gradients are means over ranks, as this library's are over rows: the same where each rank has
    equally many rows.

    Args:
        plan: a data parallel plan, or what its `module_plan()` gives.

    Raises:
        PlanError: a layer is split; or torch has no words for the plan, as the text says.
    """
    told = _module_plan(plan)
    if told.styles:
        name, how = next(iter(told.styles.items()))
        raise PlanError(
            f"{name!r} is split ({how.style}), and fully_shard computes every layer whole: "
            "to_dtensor(plan) has it, and Plan.data_parallel(graph, world_size) splits none"
        )
    return FullyShard(told.blocks, told.world_size)


def _module_plan(plan: Plan | ModulePlan) -> ModulePlan:
    if isinstance(plan, ModulePlan):
        return plan
    if not isinstance(plan, Plan):
        raise PlanError(f"a Plan, or its module_plan(), is exported, got {type(plan).__name__}")
    return plan.module_plan()


_STYLES: Mapping[str, type[ColwiseParallel | RowwiseParallel]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
}


def _style(how: ModuleStyle) -> ParallelStyle:
    made: ParallelStyle = _STYLES[how.style](
        input_layouts=_PLACEMENTS[how.reads], output_layouts=_PLACEMENTS[how.gives]
    )
    return made
