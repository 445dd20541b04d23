"""A plugin of pytest that selects tests by their ids, in that order, and records their outcomes.

It is configured by environment variables, since it runs in a process of its own (`-p` in suite.py).
"""

import faulthandler
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.mutants import witness

CHOSEN, FOUND = "WORKBENCH_CHOSEN", "WORKBENCH_FOUND"
"""Environment variables: the path of a file with {id: seconds allowed}, if any; the path of
results."""


class Observer:
    """Runs the selected tests, each within its time; writes a line for every test."""

    def __init__(self) -> None:
        self._found = Path(os.environ[FOUND])
        chosen = os.environ.get(CHOSEN)
        self._allowed: dict[str, float] | None = (
            json.loads(Path(chosen).read_text()) if chosen else None
        )
        self._said = os.dup(2)  # before pytest takes what tests say
        self._number = witness.NO_TEST

    def write(self, **found: Any) -> None:
        """Adds a line to the results."""
        with self._found.open("a") as out:
            out.write(json.dumps(found) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keeps the selected tests; missing ones are ignored."""
        if self._allowed is not None:
            turn = {name: index for index, name in enumerate(self._allowed)}
            items[:] = [item for item in items if item.nodeid in turn]
            items.sort(key=lambda item: turn[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        """Counts tests."""
        self._number += 1
        witness.next_test(self._number)
        engines = "engines" in getattr(item, "fixturenames", ())
        self.write(test=item.nodeid, number=self._number, engines=engines)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Ends the process, with all threads' stacks, if a test takes longer than allowed."""
        if self._allowed is not None:
            faulthandler.dump_traceback_later(
                self._allowed[item.nodeid], exit=True, file=self._said
            )
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Writes the outcome of a phase of a test."""
        said = report.longreprtext.splitlines()
        errors = [line for line in said if line.startswith("E ")]
        self.write(
            test=report.nodeid,
            phase=report.when,
            outcome=report.outcome,
            seconds=report.duration,
            said=(errors or said or [""])[0] if report.failed else "",
        )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin; Hypothesis draws the same examples in every run, without shrinking."""
    settings.register_profile(
        "mutants",
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=tuple(HealthCheck),
    )
    settings.load_profile("mutants")
    config.pluginmanager.register(Observer(), "workbench-mutants")
