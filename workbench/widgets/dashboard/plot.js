// A chart over the step: uPlot, a legend with values, a cursor that mouse and arrow keys move.

import uPlot from "uplot";
import { element, legend, panel } from "../element.js";
import { latest } from "./feed.js";

const HEIGHT = 190;

// axes: {scale: {label, side, ticks, max, color}}, the first one drawing the grid.
// draw(curves, data, remark): curves are [{name, label, color, format, axis, dots, fill, dash}];
// data is {step, name: values, ...}; the curves of one key are the same.
export function plotPanel({ title, axes, syncKey }) {
  const host = element("div", { class: "wb-plot", role: "img", tabindex: "0" });
  const { root, note } = panel(title, [], host);
  let shown = { list: root.querySelector(".wb-legend"), set: () => {} };
  let plot = null;
  let curves = [];
  let key = null;
  let points = { step: [] };
  let remark = "";

  const color = (name) => getComputedStyle(host).getPropertyValue(name).trim() || "#777";
  const font = () => `11px ${getComputedStyle(host).fontFamily}`;

  const tell = () => {
    const at = plot.cursor.idx;
    const under = at !== null && at !== undefined && at < points.step.length;
    const values = curves.map((c) => c.format(under ? (points[c.name][at] ?? NaN) : latest(points[c.name])));
    shown.set(values);
    note.textContent = under ? `step ${points.step[at].toLocaleString("en-US")}` : remark;
    const now = curves.map((c, i) => `${c.label} ${values[i]}`).join(", ");
    host.setAttribute("aria-label", `${title} over the step, ${points.step.length} points; ${now}`);
  };

  const options = () => ({
    width: Math.max(host.clientWidth, 200),
    height: HEIGHT,
    legend: { show: false },
    padding: [8, Object.keys(axes).length > 1 ? 0 : 12, 0, 0],
    cursor: { sync: { key: syncKey }, drag: { x: false, y: false }, points: { size: 7 } },
    hooks: { setCursor: [tell] },
    scales: {
      x: { time: false, range: (_u, low, high) => [low ?? 0, Math.max(high ?? 0, (low ?? 0) + 10)] },
      ...Object.fromEntries(
        Object.entries(axes).map(([scale, { max }]) => [
          scale,
          { range: (_u, _low, high) => [0, max ?? (high > 0 ? 1.06 * high : 1)] },
        ]),
      ),
    },
    axes: [
      {
        label: "step",
        labelSize: 16,
        labelGap: 0,
        size: 26,
        gap: 3,
        space: 60,
        incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6],
        ...ink(() => color("--wb-faint"), font),
        grid: { show: false },
        ticks: { stroke: () => color("--wb-rule"), size: 4 },
      },
      ...Object.entries(axes).map(([scale, axis], i) => ({
        scale,
        label: axis.label,
        labelSize: 14,
        labelGap: 0,
        side: axis.side,
        size: (_u, texts) => 14 + 6.5 * Math.max(1, ...(texts ?? []).map((text) => text.length)),
        gap: 4,
        space: 34,
        // Before the first step there is no scale to speak of.
        values: (_u, values) => values.map((v) => (points.step.length ? axis.ticks(v) : "")),
        ...ink(() => color(axis.color ?? "--wb-faint"), font),
        grid: { show: i === 0, stroke: () => color("--wb-rule"), width: 1 },
        ticks: { show: false },
      })),
    ],
    series: [
      {},
      ...curves.map((c) => ({
        label: c.label,
        scale: c.axis,
        width: 1.75,
        stroke: () => color(c.color),
        fill: c.fill ? () => `${color(c.color)}22` : undefined,
        dash: c.dash,
        spanGaps: Boolean(c.dots || c.joined),
        points: c.dots
          ? { show: () => few(points[c.name]), size: 7, width: 2, stroke: () => color(c.color), fill: () => color("--wb-ground") }
          : { show: (_u, _i, from, to) => to - from < 2, size: 5, stroke: () => color(c.color) },
      })),
    ],
  });

  const draw = (newCurves, newPoints, newRemark) => {
    points = newPoints;
    remark = newRemark;
    const newKey = JSON.stringify(newCurves.map(({ name, label, color, dash }) => [name, label, color, dash]));
    if (newKey !== key) {
      [key, curves] = [newKey, newCurves];
      const made = legend(curves);
      shown.list.replaceWith(made.list);
      shown = made;
      plot?.destroy();
      plot = null;
    }
    const data = [points.step, ...curves.map((c) => points[c.name])];
    if (plot === null) plot = new uPlot(options(), data, host);
    else plot.setData(data);
    tell();
  };

  const point = (left) => plot?.setCursor({ left, top: left < 0 ? left : 1 }, true, true);
  host.addEventListener("keydown", (event) => {
    const pace = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") point(-10);
    if (pace === undefined || !plot || points.step.length === 0) return;
    event.preventDefault();
    const last = points.step.length - 1;
    const at = Math.min(last, Math.max(0, (plot.cursor.idx ?? last + 1) + pace));
    point(plot.valToPos(points.step[at], "x"));
  });

  const resized = new ResizeObserver(() => {
    if (plot && host.clientWidth > 50) plot.setSize({ width: host.clientWidth, height: HEIGHT });
  });
  resized.observe(host);
  const close = () => {
    resized.disconnect();
    plot?.destroy();
  };
  return { root, draw, repaint: () => plot?.redraw(false, true), close };
}

// The same points of several runs, each under its own names, over all their steps.
export function joined(tables) {
  const [step, ...columns] = uPlot.join(tables.map((table) => [table.step, ...table.columns]));
  return { step, columns };
}

function few(values) {
  return values.reduce((count, value) => count + (value !== null), 0) <= 40;
}

function ink(stroke, font) {
  return { stroke, font: font(), labelFont: font() };
}
