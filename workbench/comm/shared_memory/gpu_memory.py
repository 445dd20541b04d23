"""Memory of a GPU that the ranks which compute on it share, through CUDA's handles.

NCCL refuses two ranks on one GPU, and gloo takes every tensor through the host and a socket. Here a
rank reads another's tensor where it lies. Ranks still meet in the host's memory (`meeting.py`), and
a rank whose kernels are not done has not come: `settle` goes before each meeting.
"""

import base64
import json
from typing import Any

import torch
from torch import Tensor


class GpuMemory:
    """Memory of one GPU, as tensors of bytes that processes share.

    Attributes:
        name: the same for two ranks only if they can share it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = str(torch.cuda.get_device_properties(device).uuid)
        torch.cuda.ipc_collect()  # what worlds before this one have shared, and others let go

    def make(self, size: int) -> Tensor:
        """Returns new memory of this rank [size], all zero."""
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def offer(self, memory: Tensor) -> str:
        """Returns where others find what `make` has made; it stays alive as long as they need."""
        _, *handle = memory.untyped_storage()._share_cuda_()
        return json.dumps([_text(word) if isinstance(word, bytes) else word for word in handle])

    def attach(self, offer: str) -> Tensor:
        """Returns another rank's memory.

        Raises:
            RuntimeError: it cannot be opened.
        """
        words = [_bytes(word) if isinstance(word, str) else word for word in json.loads(offer)]
        storage = torch.UntypedStorage._new_shared_cuda(self.device.index or 0, *words)
        return _of(storage)

    def alias(self, memory: Tensor) -> Tensor:
        """Returns the same memory, of this rank, in a tensor that does not keep it alive."""
        storage = memory.untyped_storage()
        return _of(
            torch._C._construct_storage_from_data_pointer(
                storage.data_ptr(), self.device, storage.nbytes()
            )
        )

    def settle(self) -> None:
        """Returns when all is done that this thread has asked of the device."""
        torch.cuda.current_stream(self.device).synchronize()


def memory_of(device: torch.device) -> GpuMemory | None:
    """Returns the memory of a device; None: tensors there are the host's."""
    return GpuMemory(device) if device.type == "cuda" else None


def _of(storage: Any) -> Tensor:
    """A storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _text(word: bytes) -> str:
    return base64.b64encode(word).decode()


def _bytes(word: str) -> bytes:
    return base64.b64decode(word)
