// Drawings that came from Python, their legends, and the same in figures.

import { element } from "../element.js";

export function panels(live) {
  const root = element("div", { class: "wb-grid" });
  let made = [];

  const draw = (all) => {
    if (made.length !== all.length) {
      made = all.map(() => panel(live));
      root.replaceChildren(...made.map((one) => one.root));
    }
    all.forEach((one, index) => made[index].draw(one));
  };
  return { root, draw };
}

function panel(live) {
  const title = element("h4", {});
  const note = element("span", { class: "wb-note" });
  const legend = element("ul", { class: "wb-legend" });
  const drawing = element("div", { class: "wb-drawing" });
  const root = element("section", { class: "wb-panel" },
    element("div", { class: "wb-heading" }, title, note), legend, drawing);
  let shown = {};

  // Parts of a drawing that can be chosen say what they are in `data-pick`.
  const pick = (event) => {
    const part = event.target.closest("[data-pick]");
    if (part) live.ask({ type: "pick", name: part.dataset.pick });
  };
  drawing.addEventListener("click", pick);
  drawing.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      pick(event);
    }
    move(drawing, event);
  });

  const draw = (now) => {
    title.textContent = now.title;
    note.textContent = now.note;
    root.setAttribute("aria-label", now.title);
    root.classList.toggle("wb-wide", now.wide);
    const entries = JSON.stringify(now.legend);
    if (entries !== shown.entries) {
      legend.replaceChildren(...now.legend.map(entry));
      legend.hidden = now.legend.length === 0;
    }
    if (now.svg !== shown.svg) {
      const at = drawing.contains(document.activeElement) ? document.activeElement.dataset.cell : undefined;
      drawing.innerHTML = now.svg; // all names in it were escaped where it was made
      const svg = drawing.firstElementChild;
      svg.removeAttribute("width");
      svg.removeAttribute("height");
      svg.setAttribute("role", drawing.querySelector("[data-cell]") ? "group" : "img");
      const cells = [...drawing.querySelectorAll("[data-cell]")];
      cells.forEach((cell, index) => cell.setAttribute("tabindex", index === 0 ? 0 : -1));
      if (at !== undefined) (cells.find((cell) => cell.dataset.cell === at) ?? cells[0])?.focus();
    }
    drawing.firstElementChild.setAttribute("aria-label", now.alt);
    shown = { entries, svg: now.svg };
  };
  return { root, draw };
}

function entry({ label, color, value, dash }) {
  const mark = dash ? "wb-dash" : "wb-swatch";
  return element("li", {},
    element("i", { class: mark, style: `--wb-color: var(--wb-${color})` }), `${label} `, element("b", {}, value));
}

// Arrow keys go from part to part; those of a matrix are named "ROW,COLUMN".
function move(drawing, event) {
  const steps = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
  const step = steps[event.key];
  const here = event.target.closest("[data-cell]");
  if (!step || !here) return;
  event.preventDefault();
  const cells = [...drawing.querySelectorAll("[data-cell]")];
  let next;
  if (here.dataset.cell.includes(",")) {
    const [row, column] = here.dataset.cell.split(",").map(Number);
    const name = `${row + step[0]},${column + step[1]}`;
    next = cells.find((cell) => cell.dataset.cell === name);
  } else {
    next = cells[cells.indexOf(here) + step[0] + step[1]];
  }
  if (!next) return;
  here.setAttribute("tabindex", -1);
  next.setAttribute("tabindex", 0);
  next.focus();
}

export function figures() {
  const caption = element("caption", {});
  const head = element("tr", {});
  const body = element("tbody", {});
  const summary = element("summary", {}, "In figures");
  const scroll = element("div", { class: "wb-scroll", tabindex: 0, role: "region", "aria-label": "figures" },
    element("table", { class: "wb-figures" }, caption, element("thead", {}, head), body));
  const root = element("details", {}, summary, scroll);
  let shown = "";
  const draw = (table) => {
    root.hidden = !table;
    const now = JSON.stringify(table);
    if (!table || now === shown) return;
    shown = now;
    caption.textContent = table.caption;
    head.replaceChildren(...table.head.map((name) => element("th", { scope: "col" }, name)));
    body.replaceChildren(...table.rows.map((row) => element("tr", {},
      ...row.map((text, i) => (i ? element("td", {}, text) : element("th", { scope: "row" }, text))))));
  };
  return { root, draw };
}
