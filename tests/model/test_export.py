"""Plans in torch's own words: `parallelize_module` and FSDP2 compute what the whole module does."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import workbench as wb
from workbench.model.tracing.trace import trace
from workbench.plan.io.errors import PlanError
from workbench.plan.plans.module_plan import ModuleStyle
from workbench.plan.plans.plan import Plan

ROWS = 3  # of each rank


class Tokens(nn.Module):
    """Two blocks of linear pairs over tokens, with residuals, between embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            for _ in range(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.begin(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


def images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 16),
        nn.ReLU(),
        nn.Linear(16, 8),
        nn.ReLU(),
        nn.Linear(8, 4),
    ).double()


def tokens() -> nn.Module:
    torch.manual_seed(0)
    return Tokens().double()


def chosen(name: str, world: int, k: int) -> tuple[nn.Module, tuple[int, ...], Plan]:
    """(the net, the shape of a sample, a plan)."""
    if name == "images":
        net, shape = images(), (3, 8, 8)
        plan = Plan.data_parallel(trace(net, input_shape=shape), world)
        plan = plan.with_layer("4", scheme="shard_out", group_size=k)
        return net, shape, plan.with_layer("6", scheme="shard_in", group_size=k)
    if name == "outputs":  # a layer whose output is gathered, and one that reads it whole
        net, shape = images(), (3, 8, 8)
        plan = Plan.data_parallel(trace(net, input_shape=shape), world)
        plan = plan.with_layer("4", scheme="shard_out", group_size=k)
        return net, shape, plan.with_layer("8", scheme="shard_out", group_size=k)
    if name == "inputs":  # alone, and the last
        net, shape = images(), (3, 8, 8)
        plan = Plan.data_parallel(trace(net, input_shape=shape), world)
        plan = plan.with_layer("4", scheme="shard_in", group_size=k)
        return net, shape, plan.with_layer("8", scheme="shard_in", group_size=k)
    net, shape = tokens(), (5, 6)
    plan = Plan.data_parallel(trace(net, input_shape=shape), world)
    for block in range(2):
        plan = plan.with_layer(f"blocks.{block}.1", scheme="shard_out", group_size=k)
        plan = plan.with_layer(f"blocks.{block}.3", scheme="shard_in", group_size=k)
    return net, shape, plan


def batch(shape: tuple[int, ...], world: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(world * ROWS, *shape, dtype=torch.float64, generator=generator)


def whole(net: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    y = net(x)
    y.square().sum().backward()
    return y.detach(), {name: p.grad for name, p in net.named_parameters()}


def split(config, name: str, world: int, k: int, store: str):
    """(outputs of this rank's rows, whole gradients) as torch's parallel module has them."""
    net, shape, plan = chosen(name, world, k)
    told = plan.module_plan()
    dist.init_process_group("gloo", f"file://{store}", rank=config.rank, world_size=world)
    try:
        mesh = init_device_mesh("cpu", told.mesh_shape, mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], wb.to_dtensor(plan))
        own = batch(shape, world)[config.rank * ROWS : (config.rank + 1) * ROWS]
        y = net(own)
        y.square().sum().backward()
        gradients, cut = {}, []
        for each, parameter in net.named_parameters():
            grad = parameter.grad
            if isinstance(grad, DTensor):
                cut.append(each)
                grad = grad.full_tensor()
                dist.all_reduce(grad, group=mesh["dp"].get_group())
            else:
                dist.all_reduce(grad)
            gradients[each] = grad
        assert set(cut) == set(told.sharded)
        assert set(gradients) - set(cut) == set(told.replicated)
        return y.detach(), gradients
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("world", "k"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("name", ["images", "outputs", "inputs", "tokens"])
def test_torch_computes_what_the_whole_module_does(on_ranks, tmp_path, name, world, k):
    found = on_ranks.seated(world, split, name, world, k, str(tmp_path / "store"))
    net, shape, _ = chosen(name, world, k)
    y, gradients = whole(net, batch(shape, world))
    torch.testing.assert_close(torch.cat([own for own, _ in found]), y, rtol=1e-10, atol=1e-10)
    for _, own in found:
        for each, grad in gradients.items():
            torch.testing.assert_close(own[each], grad, rtol=1e-10, atol=1e-10)


def sharded(config, world: int, store: str):
    """Weights after two steps of FSDP2."""
    net, shape = tokens(), (5, 6)
    plan = Plan.data_parallel(trace(net, input_shape=shape), world)
    told = wb.to_fsdp(plan)
    assert told.modules == ("blocks.0", "blocks.1")
    dist.init_process_group("gloo", f"file://{store}", rank=config.rank, world_size=world)
    try:
        told.apply(net, init_device_mesh("cpu", plan.module_plan().mesh_shape))
        assert all(isinstance(p, DTensor) for p in net.parameters())
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        own = batch(shape, world)[config.rank * ROWS : (config.rank + 1) * ROWS]
        for _ in range(2):
            optimizer.zero_grad()
            net(own).square().mean().backward()
            optimizer.step()
        return {name: p.full_tensor().detach() for name, p in net.named_parameters()}
    finally:
        dist.destroy_process_group()


def test_fully_shard_trains_as_one_process(on_ranks, tmp_path):
    found = on_ranks.seated(2, sharded, 2, str(tmp_path / "store"))
    net = tokens()
    optimizer, x = torch.optim.AdamW(net.parameters(), lr=0.01), batch((5, 6), 2)
    for _ in range(2):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    for own in found:
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(own[name], parameter.detach(), rtol=1e-10, atol=1e-10)


def test_a_pair_keeps_its_features():
    _, _, plan = chosen("images", 4, 2)
    told = plan.module_plan()
    assert told.styles == {
        "4": ModuleStyle("colwise", "rows", "features"),
        "6": ModuleStyle("rowwise", "features", "rows"),
    }
    assert told.mesh_shape == (2, 2)
    assert "4: colwise, reads rows, gives features" in str(told)
    _, _, plan = chosen("outputs", 4, 2)
    assert plan.module_plan().styles["4"].gives == "rows"


def refused(plan: Plan, *parts: str) -> None:
    for part in parts:
        with pytest.raises(PlanError, match=part):
            wb.to_dtensor(plan)


def test_what_torch_cannot_say_is_refused_with_the_layer():
    _, _, plan = chosen("images", 4, 2)
    refused(plan.with_layer("4", shares=(3, 1)), "'4': pieces of 12/4 are not those of torch")
    refused(plan.with_layer("0", scheme="shard_out", group_size=2), "'0': shard_out of torch.nn.Co")
    refused(plan.with_layer("8", scheme="duplicate", group_size=2), "'8': duplicate of torch.nn.Li")
    refused(plan.with_layer("8", scheme="shard_out", group_size=4), "'4' over 2, '8' over 4")
    refused(plan.with_rows((2, 1, 1, 1)), "rows are 2:1:1:1")
    refused(plan.with_recompute("0"), "'0': recomputation")
    refused(plan.with_rounds("B"), "rounds 'B' have no name in torch")
    refused(Plan.data_parallel(plan.graph, 4), "no layer of Sequential is split: to_fsdp")
    normed = trace(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), input_shape=(6,))
    synchronized = Plan.data_parallel(normed, 2).with_batch_norm("synchronized")
    with pytest.raises(PlanError, match=r"'1': synchronized batch norm.*convert_sync_batchnorm"):
        wb.to_fsdp(synchronized)
    with pytest.raises(PlanError, match=r"'4' is split \(colwise\).*to_dtensor"):
        wb.to_fsdp(plan)
    with pytest.raises(PlanError, match="its module_plan"):
        wb.to_dtensor(plan.graph)
