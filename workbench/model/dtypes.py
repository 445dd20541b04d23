"""Torch's element types by their names, as texts have them: a name in a text leads to no other."""

import torch

TORCH_DTYPES = {
    str(each).removeprefix("torch."): each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype)
}
