"""Work in which the garbage collector is not run.

A full collection goes through all that torch has imported, a tenth of a second each time, and a
search makes so many small values that some happen in every one: a quarter of its time (ResNet-152
at 8 ranks). What it makes has no cycles, and goes when nobody refers to it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Puts collections off until the end; where they are off already, they stay so."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
