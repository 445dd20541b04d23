// Memory of every rank against its device, and what each holds, with shares to scale.

import { element, panel, setText } from "../element.js";
import { size } from "../units.js";

const PARTS = [
  { name: "weights", label: "weights", color: "--wb-blue" },
  { name: "gradients", label: "gradients", color: "--wb-vermilion" },
  { name: "optimizer", label: "optimizer", color: "--wb-green" },
  { name: "activations", label: "activations", color: "--wb-sky" },
  { name: "other", label: "other", color: "--wb-gray" },
];

export function memoryPanel(store) {
  const body = element("div", { class: "wb-bars", role: "list", tabindex: "0", "aria-label": "memory per rank" });
  const { root, setLegend, note } = panel("Memory per rank", PARTS, body);
  const rows = [];

  const add = () => {
    const segments = PARTS.map(({ color }) => element("i", { class: "wb-segment", style: `--wb-color: var(${color})` }));
    const limit = element("i", { class: "wb-tick", style: "--wb-color: var(--wb-ink)" });
    const label = element("span", { class: "wb-rank" });
    const value = element("span", { class: "wb-value" });
    const track = element("span", { class: "wb-track" }, ...segments, limit);
    const row = element("div", { class: "wb-row", role: "listitem" }, label, track, value);
    body.append(row);
    rows.push({ row, segments, limit, label, value });
  };

  const draw = () => {
    const { predicted, world_size: world } = store.state.values;
    const ranks = predicted?.ranks ?? [];
    while (rows.length < ranks.length) add();
    while (rows.length > ranks.length) rows.pop().row.remove();
    // Where the device is far larger than what is needed, its limit would leave a sliver of a bar.
    const most = Math.max(...ranks.map((rank) => rank.peak), 1);
    const near = ranks.some((rank) => rank.limit !== null && most > rank.limit / 8);
    const full = near ? Math.max(most, ...ranks.map((rank) => rank.limit ?? 0)) : most;
    ranks.forEach((rank, i) => {
      const { row, segments, limit, label, value } = rows[i];
      const over = rank.limit !== null && rank.peak > rank.limit;
      setText(label, `rank ${rank.rank}`);
      segments.forEach((segment, j) => { segment.style.width = `${(100 * rank.parts[PARTS[j].name]) / full}%`; });
      limit.hidden = !near || rank.limit === null;
      limit.style.left = `${(100 * rank.limit) / full}%`;
      const of = rank.limit === null ? size(rank.peak) : `${size(rank.peak)} of ${size(rank.limit)}`;
      setText(value, over ? `${of}: over by ${size(rank.peak - rank.limit)}` : of);
      row.classList.toggle("wb-over", over);
      row.title = `${rank.device ? `${rank.device}; ` : ""}highest in ${rank.when}: ${PARTS.map(({ name, label: text }) => `${text} ${size(rank.parts[name])}`).join(", ")}`;
      row.setAttribute("aria-label", `rank ${rank.rank}: ${value.textContent}; ${row.title}`);
    });
    const fullest = ranks.length ? ranks.reduce((a, b) => (b.peak > a.peak ? b : a)) : null;
    setLegend(PARTS.map(({ name }) => (fullest ? size(fullest.parts[name]) : "–")));
    const shown = ranks.length < world && ranks.length ? `${ranks.length} of ${world} ranks; ` : "";
    const known = ranks.some((rank) => rank.limit !== null) ? "" : "of what devices have, nothing is known";
    setText(note, `${shown}${fullest ? `legend: rank ${fullest.rank}` : ""}${known ? `; ${known}` : ""}`);
  };
  return { root, draw };
}

const SCHEMES = {
  replicate: "--wb-gray", shard_out: "--wb-blue", shard_in: "--wb-sky",
  shard_heads: "--wb-green", duplicate: "--wb-orange",
};
const colorOf = (scheme) => SCHEMES[scheme] ?? "--wb-purple"; // all own ones alike

export function holdingsPanel(store) {
  const body = element("div", { class: "wb-lanes", role: "list", "aria-label": "what each rank holds" });
  const legend = element("ul", { class: "wb-legend" });
  const note = element("span", { class: "wb-note" });
  const heading = element("div", { class: "wb-heading" }, element("h4", {}, "What each rank holds"), note);
  const root = element("section", { class: "wb-panel", "aria-label": "What each rank holds" }, heading, legend, body);
  let drawn = null;

  const draw = () => {
    const { picture, world_size: world } = store.state.values;
    const key = JSON.stringify([picture, world]);
    if (key === drawn) return;
    drawn = key;
    const whole = picture.reduce((sum, run) => sum + run.parameters, 0) || 1;
    const lanes = picture[0]?.held.length ?? 0;
    body.replaceChildren(...Array.from({ length: lanes }, (_, rank) => lane(picture, rank, whole)));
    const schemes = [...new Set(picture.map((run) => run.scheme))];
    legend.replaceChildren(...schemes.map((scheme) => element("li", {},
      element("i", { style: `--wb-color: var(${colorOf(scheme)})` }), scheme)));
    setText(note, `${lanes < world ? `the first ${lanes} of ${world} ranks; ` : ""}wide as a layer has parameters, high as the rank's share`);
  };
  return { root, draw };
}

function lane(picture, rank, whole) {
  const held = picture.reduce((sum, run) => sum + run.held[rank], 0);
  const share = `${((100 * held) / whole).toFixed(1)} %`;
  const runs = picture.map((run) => {
    const part = run.held[rank] / run.parameters;
    const names = run.first === run.last ? run.first : `${run.first} … ${run.last}`;
    const fill = element("i", { style: `height: ${100 * part}%; --wb-color: var(${colorOf(run.scheme)})` });
    return element("span", {
      style: `flex-grow: ${run.parameters / whole}`,
      title: `${names}: ${run.scheme}${run.group > 1 ? ` over ${run.group}` : ""}; rank ${rank} holds ${run.held[rank].toLocaleString("en-US")} of ${run.parameters.toLocaleString("en-US")} parameters`,
    }, fill);
  });
  return element("div", { class: "wb-row", role: "listitem", "aria-label": `rank ${rank} holds ${share} of the parameters` },
    element("span", { class: "wb-rank" }, `rank ${rank}`), element("div", { class: picture.length > 40 ? "wb-lane wb-dense" : "wb-lane" }, ...runs),
    element("span", { class: "wb-value" }, share));
}
