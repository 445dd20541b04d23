// Loss, accuracy and samples/s over the step, of one run or of several on the same axes.

import { digits, percent } from "../units.js";
import { joined, plotPanel } from "./plot.js";

const plain = (value) => value.toLocaleString("en-US");
const color = (index) => `--wb-run-${index % 8}`;
const DASHES = [6, 4];

export function lossPanel(syncKey) {
  const right = { side: 1 };
  const chart = plotPanel({
    title: "Loss and metric",
    syncKey,
    axes: { loss: { label: "loss", side: 3, ticks: plain }, accuracy: right },
  });
  const draw = (feed, remark) => {
    const { metric } = feed.runs[0].status;
    const share = metric === "accuracy";
    Object.assign(right, { label: `test ${metric}`, max: undefined, ticks: plain });
    if (share) Object.assign(right, { label: "test accuracy (%)", max: 1, ticks: (v) => `${Math.round(100 * v)}` });
    const format = share ? percent : digits;
    if (feed.runs.length === 1) {
      const alone = [
        { name: "loss", label: "loss", color: "--wb-blue", axis: "loss", format: digits },
        { name: "accuracy", label: `test ${metric}`, color: "--wb-vermilion", axis: "accuracy", format, dots: true },
      ];
      chart.draw(alone, feed.runs[0].points, remark);
    } else {
      const curves = feed.runs.flatMap(({ name }, i) => [
        { name: `loss ${i}`, label: name, color: color(i), axis: "loss", format: digits, joined: true },
        { name: `accuracy ${i}`, label: `${name} ${metric}`, color: color(i), axis: "accuracy", format, dots: true, dash: DASHES },
      ]);
      chart.draw(curves, overlaid(feed.runs, ["loss", "accuracy"]), remark);
    }
  };
  return { ...chart, draw };
}

export function speedPanel(syncKey) {
  const chart = plotPanel({ title: "Throughput", syncKey, axes: { speed: { label: "samples/s", side: 3, ticks: plain } } });
  const draw = (feed, remark) => {
    const alone = feed.runs.length === 1;
    const curves = feed.runs.map(({ name }, i) => ({
      name: `samples_per_s ${i}`,
      label: alone ? "samples/s" : name,
      color: alone ? "--wb-green" : color(i),
      axis: "speed",
      format: digits,
      fill: alone,
      joined: !alone,
    }));
    const data = overlaid(feed.runs, ["samples_per_s"]);
    const predicted = feed.forecast.samples_per_s;
    if (Number.isFinite(predicted)) {
      curves.push({ name: "predicted", label: "predicted", color: "--wb-ink", axis: "speed", format: digits, dash: DASHES });
      data.predicted = data.step.map(() => predicted);
    }
    chart.draw(curves, data, remark);
  };
  return { ...chart, draw };
}

function overlaid(runs, names) {
  const tables = runs.map(({ points }) => ({ step: points.step, columns: names.map((name) => points[name]) }));
  const { step, columns } = runs.length === 1 ? tables[0] : joined(tables);
  const data = { step };
  columns.forEach((values, i) => { data[`${names[i % names.length]} ${Math.floor(i / names.length)}`] = values; });
  return data;
}
