// The view of a cluster's jobs: what is found, a table with buttons, and pages.

import "../theme.css";
import "./tables.css";
import { element, keepKeys, setText } from "../element.js";
import { liveWidget, QUIET } from "../live.js";
import { jobRow } from "./jobrow.js";
import { rows } from "./rows.js";

const HEAD = ["Job", "State", "Progress", "Engines", "Priority", "When", "Change"];

export default liveWidget((live, el) => {
  const title = element("h3", {});
  const alert = element("p", { class: "wb-alert", role: "alert" });
  const filter = element("input", { type: "search", placeholder: "Filter: number, name, state, sweep", "aria-label": "filter jobs", spellcheck: "false" });
  const found = element("span", { class: "wb-faint", role: "status" });
  const body = element("tbody", { role: "rowgroup" });
  const table = element("table", { class: "wb-table", role: "table" },
    element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...HEAD.map((name) => element("th", { scope: "col", role: "columnheader" }, name)))), body);
  const scroll = element("div", { class: "wb-scroll", role: "region", "aria-label": "jobs", tabindex: 0 }, table);
  const empty = element("p", { class: "wb-faint" });
  const pages = pager(live);
  const root = element("section", { class: "wb-widget wb-jobs", "aria-label": "jobs of a cluster" },
    title, alert, element("div", { class: "wb-tools" }, filter, found, pages.root), scroll, empty);
  el.append(root);

  filter.addEventListener("input", () => live.ask({ type: "filter", value: filter.value }, "filter"));
  const drawRows = rows(body, (row) => row.id, () => jobRow(live));
  let drawn = 0;
  const draw = () => {
    const { view } = live;
    const counts = Object.entries(view.counts).map(([state, count]) => `${count.toLocaleString("en-US")} ${state}`);
    setText(title, `Jobs of cluster ${view.cluster}: ${counts.join(", ") || "none yet"}`);
    const wrong = [live.quiet ? QUIET : "", view.gone, view.error].filter(Boolean).join("\n");
    setText(alert, wrong);
    alert.hidden = !wrong;
    root.classList.toggle("wb-gone", Boolean(live.quiet || view.gone));
    if (filter.value !== view.filter && document.activeElement !== filter) filter.value = view.filter;
    setText(found, view.filter ? `${view.found.toLocaleString("en-US")} of ${view.total.toLocaleString("en-US")} jobs` : "");
    drawRows(view.rows);
    scroll.hidden = view.rows.length === 0;
    setText(empty, view.total ? "No job has all of these words." : "Nothing was submitted yet: cluster.train(experiment), or cluster.jobs.submit(experiment).");
    empty.hidden = view.rows.length > 0;
    pages.draw(view);
    Object.assign(root.dataset, { drawn: ++drawn, total: view.total, page: view.page });
  };
  keepKeys(root);
  live.listeners.add(draw);
  draw();
  return () => live.listeners.delete(draw);
});

function pager(live) {
  const turn = (text, label, by) => {
    const made = element("button", { type: "button", "aria-label": label, title: label }, text);
    made.addEventListener("click", () => live.ask({ type: "page", value: live.view.page + by }));
    return made;
  };
  const back = turn("‹", "previous page", -1);
  const on = turn("›", "next page", 1);
  const where = element("span", { class: "wb-faint" });
  const root = element("nav", { class: "wb-pages", "aria-label": "pages of jobs" }, back, where, on);
  const draw = ({ page, pages }) => {
    root.hidden = pages === 1;
    setText(where, `page ${page.toLocaleString("en-US")} of ${pages.toLocaleString("en-US")}`);
    back.disabled = page === 1;
    on.disabled = page === pages;
  };
  return { root, draw };
}
