"""What NVIDIA's library says of GPUs, where there is one."""

from contextlib import suppress
from typing import Any


class Gpus:
    """Memory in use on this host's GPUs."""

    def __init__(self) -> None:
        self._library: Any = None
        with suppress(Exception):  # no driver, or no GPU: there is nothing to say
            import pynvml

            pynvml.nvmlInit()
            self._library = pynvml

    def bytes_of(self, gpu: str) -> int:
        """Memory that is in use on a GPU.

        Args:
            gpu: its number or UUID; "" for none.
        """
        if self._library is None or not gpu:
            return 0
        with suppress(Exception):  # it fell off the bus, or is somebody else's
            by_index, by_uuid = (
                self._library.nvmlDeviceGetHandleByIndex,
                self._library.nvmlDeviceGetHandleByUUID,
            )
            handle = by_index(int(gpu)) if gpu.isdecimal() else by_uuid(gpu)
            return int(self._library.nvmlDeviceGetMemoryInfo(handle).used)
        return 0
