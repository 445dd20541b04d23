"""Ranks on GPUs; on a machine with fewer GPUs than ranks, several share one."""

import os

import pytest
import torch

from tests.ranks import Ranks, gpus


@pytest.fixture(scope="session")
def on_gpus(engines) -> Ranks:
    """As `on_ranks`, with each rank on a GPU, whose kernels leave the same bits each time."""
    engines[:].apply_sync(settle)
    return Ranks(engines, gpus())


def settle() -> None:
    """Has a process compute on GPUs in full precision, and in one order."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
