"""An engine's memory, so that steps take the same whatever the engine has done before.

glibc maps large tensors anew each time and gives back what is free at the heap's end, from sizes
on that depend on what has been freed so far: a small network's step then touches thousands of
pages for the first time, over and over, and a tenth of its time goes into that (measured: ResNet-18
on 8 images of 32 x 32, 4,600 page faults in every step, and 18 with these settings). So freed
memory stays until a task is over.

A full garbage collection goes through all that torch has imported, in a tenth of a second, in some
step of some rank. What is there before the first task is there for good, and is left out of it.
"""

import ctypes
import gc
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_NEVER = -1
_MOST_MMAP_BYTES = 2**25  # glibc takes no more


def keep_freed() -> None:
    """From now on freed memory stays with the process; what has been imported is not collected."""
    if gc.get_freeze_count() == 0:
        gc.collect()
        gc.freeze()
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_TRIM_THRESHOLD, _NEVER)
        libc.mallopt(_MMAP_THRESHOLD, _MOST_MMAP_BYTES)


def give_back() -> None:
    """What nobody needs any more goes back to the system: models are full of cycles."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
