"""The bench of widgets finds what it promises."""

import pytest

from tests.browser import chromium
from workbench.bench.progress import Progress
from workbench.bench.widgets import widgets


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="no Chromium is installed")
def test_quick():
    *_, report = widgets.run(Progress(say=lambda line: None), quick=True)
    assert set(report.figures) == {
        "editor_redraw_ms",
        "editor_first_paint_ms",
        "editor_patch_bytes",
        "dashboard_lag_ms",
        "dashboard_slowdown",
        "dashboard_frames_per_s",
        "dashboard_memory_growth",
        "dashboard_kernel_memory_growth",
        "dashboard_kernel_busy",
    }
    assert all(figure.min > 0 for figure in report.figures.values())
    assert [row["ranks"] for row in report.rows if "ranks" in row] == [64]
    assert report.rows[0]["model"] == "vgg11"


def test_without_a_browser_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(widgets, "chromium", lambda: None)
    with pytest.raises(RuntimeError, match="install chromium"):
        next(widgets.run(Progress(), quick=True))
