"""What computes on another device than the host makes nothing on the host.

The meta device stands for it: whatever an operation makes or takes elsewhere is seen. A GPU would
refuse it, or copy it to and fro.
"""

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracle.cases import graph_of
from tests.oracle.found import EQUAL
from tests.oracle.models import Net
from tests.oracle.written import WRITTEN
from workbench.comm.groups.group import Group
from workbench.comm.messages.recorder import Recorder
from workbench.layers.cut import HeldPieces, cut, evaluating
from workbench.layers.cut_model import CutModel, group_specs
from workbench.layers.local.context import BatchContext
from workbench.model.tracing.trace import skeleton
from workbench.plan.plans.plan import Plan

DEVICE, HOST, ROWS = torch.device("meta"), torch.device("cpu"), 4
NETS = {name: case.net for name, case in (EQUAL | WRITTEN).items()}
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about what drawn modules do


class There(TorchDispatchMode):
    """Every tensor but numbers lies on the device."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1  # nobody knows it there
        made = function(*args, **(kwargs or {}))
        for one in pytree.tree_leaves((args, kwargs, made)):
            if isinstance(one, torch.Tensor) and one.ndim and one.device != DEVICE:
                raise AssertionError(f"{function} has {tuple(one.shape)} on {one.device}")
        return made


def model_of(net: Net, device: torch.device = DEVICE) -> CutModel:
    module, graph = net.build(), graph_of(net)
    named = (module.named_parameters, module.named_buffers)  # by all their names
    held = HeldPieces({n: t for of in named for n, t in of(remove_duplicate=False)})
    plan = Plan.data_parallel(graph, 1)
    groups = {spec: Group(*spec, 0, Recorder()) for spec in group_specs(plan)}
    context = BatchContext(0, (ROWS,), seed=0)
    return cut(plan, context, groups, held, device=device, traced=skeleton(graph))


def inputs_of(net: Net, device: torch.device = DEVICE) -> list[torch.Tensor]:
    return [
        torch.ones(ROWS, *one.shape, dtype=getattr(torch, one.dtype), device=device)
        for one in graph_of(net).inputs
    ]


def learned(model: CutModel, inputs: list[torch.Tensor]) -> set[str]:
    """The parameters that get a gradient."""
    outputs = model.train()(*inputs)
    sum(output.float().sum() for output in outputs if output.requires_grad).backward()
    return {name for name, one in model.trainable().items() if one.grad is not None}


@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
def test_a_step_makes_nothing_on_the_host(net):
    on_host = learned(model_of(net, HOST), inputs_of(net, HOST))
    model, inputs = model_of(net), inputs_of(net)
    with There():
        assert learned(model, inputs) == on_host


@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
def test_nor_does_an_evaluation(net):
    model = evaluating(model_of(net)).eval()
    with There(), torch.no_grad():
        model(*inputs_of(net))
