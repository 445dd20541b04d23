"""Dashboards without a browser, and in one."""

import pytest

from tests.widgets.dashboard.views import PATIENCE_S, Views
from workbench.widgets.dashboard import Dashboard


@pytest.fixture
def views(monkeypatch):
    made = Views()
    monkeypatch.setattr(Dashboard, "send", made.take)
    return made


@pytest.fixture
def show():
    shown = []

    def make(run, **options):
        shown.append(Dashboard(run, **{"interval_s": 0.01, **options}))
        return shown[-1]

    yield make
    for dashboard in shown:
        dashboard.close()
        dashboard._thread.join(PATIENCE_S)
        assert not dashboard._thread.is_alive()


@pytest.fixture
def stage(page, problems):
    """`stage(run, theme="light", machine=None)` shows one; the test feeds the run."""
    dashboards = []

    def show(runs, theme="light", machine=None):
        from tests.widgets.dashboard.stage import Stage

        dashboards.append(Dashboard(runs, machine, interval_s=0.001))
        return Stage(page, dashboards[-1], theme)

    yield show
    for dashboard in dashboards:
        dashboard.close()
