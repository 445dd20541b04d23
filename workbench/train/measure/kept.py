"""What libraries keep on a GPU for themselves."""

import torch
from torch import nn

_SIDE = 64


def library_bytes(device: torch.device) -> int:
    """Bytes that cuBLAS keeps on a GPU once a linear layer has run there, forward and backward.

    It has a workspace for each thread that computes: backward passes have one of their own.

    Args:
        device: the device; one that is no GPU keeps nothing.
    """
    if device.type != "cuda":
        return 0
    layer = nn.Linear(_SIDE, _SIDE, device=device)
    x = torch.ones(_SIDE, _SIDE, device=device, requires_grad=True)
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(device)
    torch.autograd.grad(layer(x).sum(), (x, *layer.parameters()))
    return torch.cuda.memory_allocated(device) - before
