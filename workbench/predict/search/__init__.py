"""The search for the plan with the least predicted step time."""

from workbench.predict.search.refusal import MemoryLimitError
from workbench.predict.search.result import SearchResult
from workbench.predict.search.search import search

__all__ = ["MemoryLimitError", "SearchResult", "search"]
