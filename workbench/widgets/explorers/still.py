"""An explorer as a still picture with a table: what is left of it where no kernel runs."""

from collections.abc import Mapping
from html import escape
from typing import Any

from workbench.predict.tables import html_table
from workbench.widgets.charts import image
from workbench.widgets.explorers.colours import COLOURS

MOST_ROWS = 80


def html(view: Mapping[str, Any]) -> str:
    """Of what a view shows, in HTML that untrusted notebooks show too."""
    parts = [f"<p><b>{escape(view['title'])}</b></p>"]
    values = [
        f"{control['label']}: {control.get('text', control.get('at', ''))}"
        for control in view["controls"]
        if control["kind"] != "button"
    ]
    if values:
        parts.append(f"<p>{escape('; '.join(values))}</p>")
    if view["error"]:
        parts.append(f"<p>{escape(view['error'])}</p>")
    parts += [f"<p>{escape(said)}</p>" for said in view["said"]]
    for panel in view["panels"]:
        parts.append(f"<p>{escape(panel['title'])}{_legend(panel)}</p>")
        parts.append(image(panel["svg"], panel["alt"]))
    if table := view["table"]:
        rows = table["rows"][:MOST_ROWS]
        if len(table["rows"]) > MOST_ROWS:
            more = f"... {len(table['rows']) - MOST_ROWS:,} more"
            rows = (*rows, (more, *[""] * (len(table["head"]) - 1)))
        told = html_table(table["caption"], table["head"], rows)
        parts.append(f"<details><summary>In figures</summary>{told}</details>")
    return f"<div>{''.join(parts)}</div>"


def _legend(panel: Mapping[str, Any]) -> str:
    parts = []
    for entry in panel["legend"]:
        said = escape(f"{entry['label']} {entry['value']}".strip())
        parts.append(f" <span style='color:{COLOURS[entry['colour']]}'>■</span> {said}")
    return "".join(parts)
