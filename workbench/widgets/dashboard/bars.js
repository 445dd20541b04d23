// Horizontal bars, one for each rank, under one scale; what was predicted lies below as a thin one.

import { element, panel } from "../element.js";

const ALL_EVERY_MS = 700; // hundreds of rows and their words need not change with each frame
const ROW = 24; // pixels, as in theme.css

// parts: [{name, label, color}] stacked from the left; marks: [{name, label, color, class}].
// draw(rows): [{values: [...], below: [...], marks: [...], text, words()}], NaN for what is not known.
export function barPanel({ title, parts, marks = [], valueWidth }) {
  const style = `--wb-value-width: ${valueWidth}`;
  const body = element("div", { class: "wb-bars", role: "list", tabindex: "0", "aria-label": title, style });
  const entries = [...parts, ...marks.map((mark) => ({ ...mark, kind: "wb-tick" }))];
  const { root, setLegend, note } = panel(title, entries, body);
  const rows = [];
  let told = -Infinity;
  let timer;
  let now = [];
  let full = 1;
  let first = 0; // of the rows in sight

  const addRow = (rank) => {
    const bar = element("i", { class: "wb-bar" });
    const below = element("i", { class: "wb-below" });
    const ticks = marks.map((mark) => element("i", { class: `wb-tick ${mark.class ?? ""}`, style: `--wb-color: var(${mark.color})`, hidden: "" }));
    const track = element("span", { class: "wb-track" }, bar, below, ...ticks);
    const value = element("span", { class: "wb-value" });
    const label = element("span", { class: "wb-rank" }, `rank ${rank}`);
    const row = element("div", { class: "wb-row", role: "listitem" }, label, track, value);
    body.append(row);
    rows.push({ row, bar, below, ticks, value, known: {} });
  };

  const show = ({ values, below = [], marks: own = [], text, isOver }, i) => {
    const { row, bar, below: thin, ticks, value, known: before } = rows[i];
    paint(bar, "bar", values, parts, full, before);
    paint(thin, "below", below, parts, full, before);
    ticks.forEach((tick, j) => {
      const left = Number.isFinite(own[j]) ? `${((100 * own[j]) / full).toFixed(1)}%` : "";
      if (before[j] === left) return;
      before[j] = left;
      tick.hidden = left === "";
      tick.style.left = left;
    });
    if (value.textContent !== text) value.textContent = text;
    row.classList.toggle("wb-over", Boolean(isOver));
  };
  const showSeen = () => {
    const last = first + Math.ceil(206 / ROW) + 1;
    now.slice(first, last).forEach((rank, i) => show(rank, first + i));
  };
  body.addEventListener("scroll", () => {
    first = Math.floor(body.scrollTop / ROW);
    showSeen();
  });

  const showAll = () => {
    timer = undefined;
    told = performance.now();
    now.forEach((rank, i) => {
      show(rank, i);
      const { row } = rows[i];
      const words = rank.words();
      if (row.title === words) return;
      row.title = words;
      row.setAttribute("aria-label", `rank ${i}: ${words}`);
    });
  };

  const draw = (ranks, summary) => {
    now = ranks;
    while (rows.length < ranks.length) addRow(rows.length);
    while (rows.length > ranks.length) rows.pop().row.remove();
    body.dataset.ranks = ranks.length;
    const longest = ({ values, below = [], marks: own = [] }) => Math.max(sum(values), sum(below), ...own.map(known));
    full = Math.max(...ranks.map(longest), 0) || 1;
    if (performance.now() - told > ALL_EVERY_MS) showAll();
    else {
      showSeen();
      timer ??= setTimeout(showAll, ALL_EVERY_MS);
    }
    setLegend([...summary, ...marks.map(() => "")]);
  };
  return { root, draw, note, close: () => clearTimeout(timer) };
}

// One background with hard edges: of hundreds of bars, none makes the page lay itself out again.
function paint(node, name, values, parts, full, before) {
  let at = 0;
  const stops = values.map((value, i) => {
    const from = at;
    at += (100 * known(value)) / full;
    return `var(${parts[i].color}) ${from.toFixed(1)}% ${at.toFixed(1)}%`;
  });
  const wanted = at > 0 ? `linear-gradient(to right, ${stops.join(", ")}, transparent ${at.toFixed(1)}%)` : "none";
  if (before[name] !== wanted) {
    before[name] = wanted;
    node.style.background = wanted;
  }
}

export function known(value) {
  return Number.isFinite(value) ? value : 0;
}

function sum(values) {
  return values.reduce((total, value) => total + known(value), 0);
}

export function largest(values) {
  const found = values.filter(Number.isFinite);
  return found.length ? Math.max(...found) : NaN;
}

export function average(values) {
  const found = values.filter(Number.isFinite);
  return found.length ? found.reduce((a, b) => a + b, 0) / found.length : NaN;
}
