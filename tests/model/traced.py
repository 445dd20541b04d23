"""Running traced structures with values, to compare them with the modules that they came from."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from workbench.model import skeleton, trace
from workbench.plan.graph.graph import Graph


def values_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of everything that a module holds, by name."""
    held: dict[str, Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return {name: tensor.detach().clone() for name, tensor in held.items()}


def run_traced(traced: torch.fx.GraphModule, values: dict[str, Tensor], x: Tensor) -> Any:
    """The output of a traced structure with these values."""
    held = {name: values[name] for name in values_of(traced)}
    return torch.func.functional_call(traced, held, (x,), tie_weights=False)


def assert_computes_the_same(graph: Graph, module: nn.Module, *, rows: int = 4) -> None:
    """The skeleton gives what the module gives, in training mode, with the same random draws."""
    values = values_of(module)
    x = torch.randn(rows, *graph.input_shape)
    outputs = []
    structure = skeleton(graph)
    for call in (module.train(), lambda x: run_traced(structure, values, x)):
        torch.manual_seed(1)
        output = call(x.clone())
        outputs.append(tuple(output) if isinstance(output, tuple) else (output,))
    for ours, theirs in zip(*outputs, strict=True):
        assert_close(ours, theirs, rtol=0, atol=0)


def traced(module: nn.Module, *shape: int) -> Graph:
    """The graph of a module, checked to compute the same."""
    graph = trace(module, input_shape=shape)
    assert_computes_the_same(graph, module)
    return graph


def calling(forward: Any, **attributes: Any) -> nn.Module:
    """A module with this forward method and these attributes."""
    cls = type(forward.__name__, (nn.Module,), {"forward": forward})
    module: nn.Module = cls()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module
