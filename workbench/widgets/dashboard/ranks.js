// What each rank holds, spends and receives, beside what was predicted.

import { milliseconds, size } from "../units.js";
import { average, barPanel, known, largest } from "./bars.js";
import { CATEGORIES } from "./feed.js";

const COLORS = ["--wb-blue", "--wb-orange", "--wb-green", "--wb-second", "--wb-gray"];
const rate = (bytes) => (Number.isFinite(bytes) ? `${size(bytes)}/s` : "–");
const NEAR = 3; // a limit that is further away than this makes all bars short

export function memoryPanel() {
  const chart = barPanel({
    title: "Memory per rank",
    valueWidth: "10em",
    parts: CATEGORIES.map((name, i) => ({ name, label: name, color: COLORS[i] })),
    marks: [
      { label: "peak", color: "--wb-ink" },
      { label: "limit", color: "--wb-bad", class: "wb-limit" },
    ],
  });
  const draw = ({ ranks, limits, expected, conditions }) => {
    const most = largest(ranks.map((rank) => rank.peak));
    const rows = ranks.map((rank, i) => {
      const isKnown = Number.isFinite(rank.weights);
      const values = isKnown ? CATEGORIES.map((name) => rank[name]) : [rank.now];
      const held = values.reduce((a, b) => a + b, 0); // at the last step's peak
      const below = expected[i] ? CATEGORIES.map((name) => expected[i][name]) : [];
      const [limit, predicted] = [limits[i], below.reduce((a, b) => a + b, 0)];
      const parts = () => (isKnown ? CATEGORIES.map((name) => `${name} ${size(rank[name])}`).join(", ") : "");
      return {
        values,
        below,
        marks: [rank.peak, limit < NEAR * most ? limit : NaN],
        isOver: rank.peak > limit,
        text: Number.isFinite(limit) ? `${size(held)} of ${size(limit)}` : `${size(held)} / ${size(rank.peak)}`,
        words: () => `${rank.onGpu ? "GPU" : "tensors"} now ${size(rank.now)}, peak ${size(rank.peak)}`
          + `${Number.isFinite(limit) ? ` of ${size(limit)}` : ""}; ${parts()}`
          + `${below.length ? `; predicted ${size(predicted)}` : ""}${conditions[i] ? `; ${conditions[i]}` : ""}`,
      };
    });
    chart.draw(rows, CATEGORIES.map((name) => size(largest(ranks.map((rank) => rank[name])))));
    const where = ranks.some((rank) => rank.onGpu) ? "on the GPU" : "of tensors";
    chart.note.textContent = expected.length ? `${where}; thin: predicted` : where;
  };
  return { ...chart, draw };
}

export function clockPanel() {
  const names = ["compute", "communication", "wait"];
  const colors = ["--wb-green", "--wb-orange", "--wb-gray"];
  const chart = barPanel({
    title: "Time of a step per rank",
    valueWidth: "4.6em",
    parts: names.map((name, i) => ({ name, label: name, color: colors[i] })),
    marks: [{ label: "predicted", color: "--wb-ink" }],
  });
  const draw = ({ ranks, forecast, conditions, runs, shown }) => {
    const rows = ranks.map((rank, i) => {
      const values = names.map((name) => rank[name]);
      const total = values.reduce((a, b) => a + known(b), 0);
      return {
        values,
        marks: [forecast.step_s ?? NaN],
        text: conditions[i] || milliseconds(total || NaN),
        words: () => names.map((name) => `${name} ${milliseconds(rank[name])}`).join(", ")
          + `${conditions[i] ? `; ${conditions[i]}` : ""}`,
      };
    });
    chart.draw(rows, names.map((name) => milliseconds(average(ranks.map((rank) => rank[name])))));
    chart.note.textContent = `mean of the last ${runs[shown].status.recent} steps`;
  };
  return { ...chart, draw };
}

export function linksPanel() {
  const chart = barPanel({
    title: "Links: received per rank",
    valueWidth: "6em",
    parts: [{ name: "received", label: "bytes per second", color: "--wb-sky" }],
    marks: [{ label: "predicted", color: "--wb-ink" }],
  });
  const draw = ({ ranks, expected, forecast }) => {
    const rows = ranks.map((rank, i) => {
      const seconds = forecast.step_s ?? rank.compute + rank.communication + rank.wait;
      const predicted = expected[i] ? expected[i].received / seconds : NaN;
      return {
        values: [rank.receivedPerS],
        marks: [predicted],
        text: rate(rank.receivedPerS),
        words: () => `${size(rank.receivedPerS)} per second, ${size(rank.received)} per step`
          + `${expected[i] ? `; predicted ${size(expected[i].received)} per step` : ""}`,
      };
    });
    chart.draw(rows, [rate(largest(ranks.map((rank) => rank.receivedPerS)))]);
    chart.note.textContent = `${size(largest(ranks.map((rank) => rank.received)))} per step at most`;
  };
  return { ...chart, draw };
}
