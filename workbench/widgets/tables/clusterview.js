// The view of a cluster's engines: a row for each, with bars for processor and memory.

import "../theme.css";
import "./tables.css";
import { element, keepKeys, setText } from "../element.js";
import { liveWidget, QUIET } from "../live.js";
import { size } from "../units.js";
import { rows, SYMBOLS } from "./rows.js";

const HEAD = ["Engine", "State", "Job", "Processor", "Memory", "Device"];

export default liveWidget((live, el) => {
  const title = element("h3", {});
  const alert = element("p", { class: "wb-alert", role: "alert" });
  const body = element("tbody", { role: "rowgroup" });
  const table = element("table", { class: "wb-table", role: "table" },
    element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...HEAD.map((name) => element("th", { scope: "col", role: "columnheader" }, name)))), body);
  const scroll = element("div", { class: "wb-scroll", role: "region", "aria-label": "engines", tabindex: 0 }, table);
  const root = element("section", { class: "wb-widget wb-engines", "aria-label": "engines of a cluster" }, title, alert, scroll);
  el.append(root);
  const drawRows = rows(body, (row) => row.index, engineRow);
  let drawn = 0;
  const draw = () => {
    const { view } = live;
    setText(title, `Cluster ${view.cluster}: ${view.said}`);
    const wrong = [live.quiet ? QUIET : "", view.gone, view.error].filter(Boolean).join("\n");
    setText(alert, wrong);
    alert.hidden = !wrong;
    root.classList.toggle("wb-gone", Boolean(live.quiet || view.gone));
    drawRows(view.rows);
    root.dataset.drawn = ++drawn;
  };
  keepKeys(root);
  live.listeners.add(draw);
  draw();
  return () => live.listeners.delete(draw);
});

function engineRow() {
  const name = element("th", { scope: "row", role: "rowheader" });
  const state = element("span", { class: "wb-state" });
  const job = element("td", { class: "wb-job", role: "cell" });
  const processor = meter("--wb-green");
  const memory = meter("--wb-sky");
  const device = element("td", { class: "wb-device", role: "cell" });
  const root = element("tr", { role: "row" }, name, element("td", { role: "cell" }, state), job,
    element("td", { role: "cell" }, processor.root), element("td", { role: "cell" }, memory.root), device);
  const draw = (now) => {
    root.dataset.engine = now.index;
    root.dataset.state = now.state;
    setText(name, now.label);
    name.title = now.pid === null ? "" : `process ${now.pid}`;
    setText(state, `${SYMBOLS[now.state] ?? "•"} ${now.state}`);
    state.title = now.death;
    setText(job, now.job ? `${now.job}${now.rank === null ? "" : `, rank ${now.rank}`}` : "");
    job.title = now.job;
    const percent = Math.round(100 * now.cpu_share);
    processor.draw(Math.min(now.cpu_share, 1), `${percent} %`, `engine ${now.label}: processor ${percent} % of one core`);
    const used = `${size(now.used_bytes)} of ${size(now.memory_bytes)}`;
    memory.draw(now.memory_bytes ? now.used_bytes / now.memory_bytes : 0, used, `engine ${now.label}: memory ${used}`);
    setText(device, now.device);
    device.title = now.device;
  };
  return { root, draw };
}

function meter(color) {
  const bar = element("i", { style: `--wb-color: var(${color})` });
  const text = element("span", {});
  const root = element("div", { class: "wb-meter", role: "img" }, element("span", { class: "wb-track" }, bar), text);
  const draw = (share, words, label) => {
    bar.style.width = `${(100 * Math.min(Math.max(share, 0), 1)).toFixed(1)}%`;
    setText(text, words);
    root.setAttribute("aria-label", label);
  };
  return { root, draw };
}
