"""The two ways by which ranks of one host communicate."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.ranks import Ranks


@pytest.fixture(scope="session", params=[True, False], ids=["shared", "gloo"])
def on_either(request: pytest.FixtureRequest, on_ranks: "Ranks") -> Callable[..., list[Any]]:
    """`on_ranks`, once through shared memory and once through gloo."""
    return partial(on_ranks, shared_memory=request.param)
