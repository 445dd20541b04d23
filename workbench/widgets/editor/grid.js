// A table of any length: only the rows in sight, and some around them, are in the page.

import { element } from "../element.js";
import { HEIGHT } from "./tree.js";

const AROUND = 10;

// The style's `max-height` and some more. A table whose list was short is as low until the browser
// has laid out what it shows now: what fits into its height of before is not what will be in sight.
const HEIGHT_AT_LEAST = 600;

// head: the cells of the head row. makeRow(item) gives {tr, update(item)}; keys reuse rows.
export function grid({ caption, columns, head, makeRow, onWindow }) {
  const above = element("tr", { class: "wb-spacer", "aria-hidden": "true" }, element("td", { colspan: columns }));
  const below = element("tr", { class: "wb-spacer", "aria-hidden": "true" }, element("td", { colspan: columns }));
  const body = element("tbody", {}, above, below);
  const table = element("table", { class: "wb-table" },
    element("caption", { class: "wb-unseen" }, caption), element("thead", {}, head), body);
  const root = element("div", { class: "wb-scroll" }, table);
  const rows = new Map();
  let items = [];
  let tops = [0];
  let frame = 0;

  const place = (y) => {
    let [low, high] = [0, items.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (tops[middle + 1] <= y) low = middle + 1;
      else high = middle;
    }
    return low;
  };

  const paint = () => {
    const height = Math.max(root.clientHeight, HEIGHT_AT_LEAST);
    const first = Math.max(0, place(root.scrollTop) - AROUND);
    const last = Math.min(items.length, place(root.scrollTop + height) + AROUND);
    const wanted = new Set();
    let before = above;
    for (let i = first; i < last; i++) {
      const item = items[i];
      wanted.add(item.key);
      let row = rows.get(item.key);
      if (!row) {
        row = makeRow(item);
        rows.set(item.key, row);
      }
      row.update(item, i);
      if (row.at !== i) {
        row.at = i;
        row.tr.setAttribute("aria-rowindex", i + 2);
      }
      if (before.nextSibling !== row.tr) before.after(row.tr);
      before = row.tr;
    }
    for (const [key, row] of rows) {
      if (!wanted.has(key)) {
        row.tr.remove();
        rows.delete(key);
      }
    }
    above.firstChild.style.height = `${tops[first]}px`;
    below.firstChild.style.height = `${tops[items.length] - tops[last]}px`;
    above.hidden = first === 0;
    below.hidden = last === items.length;
    onWindow?.();
  };

  // What is to be shown from the next `paint` on.
  const take = (newItems) => {
    items = newItems;
    tops = [0];
    for (const item of items) tops.push(tops.at(-1) + HEIGHT[item.type]);
    table.setAttribute("aria-rowcount", items.length + 1);
  };

  root.addEventListener("scroll", () => {
    frame ||= requestAnimationFrame(() => { frame = 0; paint(); });
  });
  const resized = new ResizeObserver(paint);
  resized.observe(root);

  // Brings a row into sight, and gives it.
  const reach = (key) => {
    const index = items.findIndex((item) => item.key === key);
    if (index < 0) return null;
    const headHeight = head.offsetHeight;
    if (tops[index] < root.scrollTop) root.scrollTop = tops[index];
    const bottom = tops[index + 1] + headHeight;
    if (bottom > root.scrollTop + root.clientHeight) root.scrollTop = bottom - root.clientHeight;
    paint();
    return rows.get(key).tr;
  };
  const close = () => {
    resized.disconnect();
    cancelAnimationFrame(frame);
  };
  return { root, table, take, paint, reach, items: () => items, close };
}
