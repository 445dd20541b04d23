"""What a forward pass writes into the model's own buffers, and who would keep it."""

import torch.fx
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from workbench.model.errors import TraceError

_REMEDY = (
    "state of the model itself is not supported, but for the statistics of nn.BatchNorm: keep it "
    "outside of the model"
)


def versions_of(root: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Each buffer, and how often it has been written, by its name."""
    found = root.named_buffers(remove_duplicate=False)
    return {name: (buffer, buffer._version) for name, buffer in found}


def refuse_written(
    root: nn.Module, graph: torch.fx.Graph, before: dict[str, tuple[Tensor, int]]
) -> None:
    """Refuses what a graph does not record, or what every rank would write from its own rows.

    Args:
        root: the module, as tracing has left it.
        graph: what was recorded.
        before: its buffers before.

    Raises:
        TraceError: forward assigns a buffer, or a module that it calls writes one.
    """
    for name, (buffer, _) in before.items():
        owner, _, leaf = name.rpartition(".")
        if root.get_submodule(owner)._buffers.get(leaf) is not buffer:
            raise TraceError(f"forward assigns the buffer {name!r}, which would be lost: {_REMEDY}")
    for path in (str(node.target) for node in graph.nodes if node.op == "call_module"):
        module = root.get_submodule(path)
        for leaf, buffer in module.named_buffers():
            was = before[f"{path}.{leaf}"][1]
            if buffer._version != was and not isinstance(module, _BatchNorm):
                raise TraceError(
                    f"{type(module).__name__} {path!r} writes its buffer {leaf!r} in training, and "
                    "every rank would from its own rows: build a norm with "
                    f"track_running_stats=False; {_REMEDY}"
                )
