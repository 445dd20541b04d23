"""Plans under a memory limit: what they hold and when, and a bound on all that fit."""

from workbench.predict.search.limit.memory_limit import MemoryLimitError, bytes_of

__all__ = ["MemoryLimitError", "bytes_of"]
