// Horizontal bars, one for each rank, under one scale.

import { element, panel } from "./element.js";

// parts: [{name, label, color}] stacked from the left; mark: the same for a tick, or undefined.
export function barPanel({ title, parts, mark, valueWidth, text, describe, summary }) {
  const style = `--wb-value-width: ${valueWidth}`;
  const body = element("div", { class: "wb-bars", role: "list", tabindex: "0", "aria-label": title, style });
  const entries = mark ? [...parts, { ...mark, kind: "wb-tick" }] : parts;
  const { root, setLegend, note } = panel(title, entries, body);
  const rows = [];

  const addRow = (rank) => {
    const segments = parts.map((part) =>
      element("i", { class: "wb-segment", style: `--wb-color: var(${part.color})` }),
    );
    const tick = mark && element("i", { class: "wb-tick", style: `--wb-color: var(${mark.color})` });
    const track = element("span", { class: "wb-track" }, ...segments, ...(tick ? [tick] : []));
    const value = element("span", { class: "wb-value" });
    const label = element("span", { class: "wb-rank" }, `rank ${rank}`);
    const row = element("div", { class: "wb-row", role: "listitem" }, label, track, value);
    body.append(row);
    rows.push({ row, segments, tick, value });
  };

  const draw = (ranks) => {
    while (rows.length < ranks.length) addRow(rows.length);
    body.dataset.ranks = ranks.length;
    const total = (rank) => parts.reduce((sum, { name }) => sum + known(rank[name]), 0);
    const full = Math.max(...ranks.map((rank) => Math.max(total(rank), mark ? known(rank[mark.name]) : 0))) || 1;
    ranks.forEach((rank, i) => {
      const { row, segments, tick, value } = rows[i];
      parts.forEach(({ name }, j) => { segments[j].style.width = `${(100 * known(rank[name])) / full}%`; });
      if (tick) {
        tick.hidden = !Number.isFinite(rank[mark.name]);
        tick.style.left = `${(100 * known(rank[mark.name])) / full}%`;
      }
      value.textContent = text(rank);
      row.title = describe(rank);
      row.setAttribute("aria-label", `rank ${i}: ${describe(rank)}`);
    });
    setLegend(summary(ranks));
  };
  return { root, draw, note };
}

export function known(value) {
  return Number.isFinite(value) ? value : 0;
}

export function largest(ranks, name) {
  const values = ranks.map((rank) => rank[name]).filter(Number.isFinite);
  return values.length ? Math.max(...values) : NaN;
}

export function average(ranks, name) {
  const values = ranks.map((rank) => rank[name]).filter(Number.isFinite);
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : NaN;
}
