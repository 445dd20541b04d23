// The table of layers: folding, filter, selection of several rows, and the keyboard.

import { element } from "../element.js";
import { grid } from "./grid.js";
import { conversionRow, layerRow } from "./row.js";
import { everyFold, listed, plant, total } from "./tree.js";

const HEADS = [
  ["", "select all rows that are shown", "wb-check"],
  ["layer", "its name in the model, or the blocks that are folded here", ""],
  ["kind", "what it computes", "wb-kind"],
  ["shape", "of its output, for one sample", "wb-shape"],
  ["parameters", "trainable elements of the whole layer", "wb-number"],
  ["scheme", "how weight and activations are placed", "wb-scheme"],
  ["group", "ranks that share one copy", "wb-group"],
  ["shares", "relative sizes of the pieces; empty: equal", "wb-shares"],
  ["recompute", "its forward pass again in backward, so that it keeps nothing", "wb-recompute"],
  ["memory", "bytes that belong to it at the rank's highest point", "wb-figure"],
  ["time", "seconds of a step: computing, then communicating", "wb-figure"],
  ["traffic", "bytes received in a step: activations, then gradients and weights", "wb-figure"],
];

export function layerTable(store) {
  let roots = plant(store.state.static.nodes);
  let open = new Set();
  let filter = "";
  let selected = new Set();
  let anchor = null;
  let active = null;
  let longest = { memory: 0, time: 0, traffic: 0 };
  const edited = new Set();
  const also = new Set();

  const chosenLayers = () => {
    const layers = new Set();
    for (const item of view.items()) {
      if (item.type === "row" && selected.has(item.key)) item.node.layers.forEach((layer) => layers.add(layer));
    }
    return [...layers].sort((a, b) => a - b);
  };

  const page = {
    state: () => store.state,
    edited,
    also,
    changed: (layers) => {
      let last = 0;
      for (const layer of layers) last = Math.max(last, store.changed.get(layer) ?? 0);
      return `${store.begun}:${last}`;
    },
    longest: () => longest,
    isOpen: (node) => open.has(node.key),
    isSelected: (node) => selected.has(node.key),
    label: (node, item) => (filter && !node.children.length ? store.state.static.facts.name[node.layer] : nameIn(node)),
    describe: (node) => (node.children.length ? path(node) : store.state.static.facts.name[node.layer]),
    edit: (node, what, value) => {
      const layers = selected.has(node.key) ? chosenLayers() : node.layers;
      store.send({ type: "edit", layers, field: what, value });
    },
    toggle: (node) => {
      if (open.has(node.key)) open.delete(node.key);
      else open.add(node.key);
      list();
      focusRow(node.key);
    },
    select: (node, event) => choose(node.key, event.shiftKey),
  };

  const all = element("input", { type: "checkbox", "aria-label": "select all rows" });
  all.addEventListener("click", () => {
    selected = all.checked ? new Set(rowsShown().map((item) => item.key)) : new Set();
    refresh();
  });
  const head = element("tr", {}, ...HEADS.map(([text, title, className], i) =>
    element("th", { scope: "col", title, class: className }, i === 0 ? all : text)));
  const view = grid({
    caption: "Layers of the model, how each is split, and what it costs",
    columns: HEADS.length,
    head,
    makeRow: (item) => (item.type === "row" ? layerRow(page, item) : conversionRow(page, item, HEADS.length)),
  });

  const note = element("span", {});
  const clear = element("button", { type: "button", class: "wb-plain" }, "Clear selection");
  clear.addEventListener("click", () => { selected = new Set(); refresh(); });
  const bulk = element("div", { class: "wb-bulk", role: "status" }, note, clear);
  const hint = element("p", { class: "wb-hint wb-faint" },
    "Keys: ↑ ↓ rows, Enter unfolds or edits, F2 edits, Space selects, Shift+↓ selects more, Ctrl+↓ same cell of the next row, Ctrl+Z undo");
  const root = element("div", { class: "wb-layers" }, view.root, bulk, hint);

  const rowsShown = () => view.items().filter((item) => item.type === "row");

  const choose = (key, range) => {
    const keys = rowsShown().map((item) => item.key);
    if (range && anchor !== null && keys.includes(anchor)) {
      const [from, to] = [keys.indexOf(anchor), keys.indexOf(key)].sort((a, b) => a - b);
      keys.slice(from, to + 1).forEach((one) => selected.add(one));
    } else {
      if (selected.has(key)) selected.delete(key);
      else selected.add(key);
      anchor = key;
    }
    refresh();
  };

  const measure = () => {
    const { state } = store;
    longest = { memory: 0, time: 0, traffic: 0 };
    for (const item of view.items()) {
      if (item.type !== "row") continue;
      const of = (column) => total(state, column, item.node.layers) ?? 0;
      longest.memory = Math.max(longest.memory, of("memory"));
      longest.time = Math.max(longest.time, of("work_s") + of("exchange_s"));
      longest.traffic = Math.max(longest.traffic, of("moved") + of("summed"));
    }
  };

  const list = () => {
    view.take(listed(roots, open, filter, store.state));
    const shown = new Set(rowsShown().map((item) => item.key));
    selected = new Set([...selected].filter((key) => shown.has(key)));
    refresh();
  };

  const refresh = () => {
    const { values } = store.state;
    edited.clear();
    also.clear();
    values.edited.forEach((layer) => edited.add(layer));
    values.also.forEach((layer) => also.add(layer));
    measure();
    view.paint();
    const layers = chosenLayers();
    bulk.hidden = selected.size < 1;
    note.textContent = `${selected.size} ${selected.size === 1 ? "row" : "rows"} with ${layers.length} ${layers.length === 1 ? "layer" : "layers"} selected: an edit in one of them is made in all.`;
    all.checked = selected.size > 0 && selected.size === rowsShown().length;
    all.indeterminate = selected.size > 0 && !all.checked;
    markActive();
    view.root.dataset.rows = view.items().length;
  };

  const markActive = () => {
    const keys = new Set(rowsShown().map((item) => item.key));
    if (!keys.has(active)) active = rowsShown()[0]?.key ?? null;
    for (const tr of view.table.querySelectorAll("tr.wb-layer")) {
      const index = tr.dataset.key === active ? 0 : -1;
      if (tr.tabIndex !== index) tr.tabIndex = index;
    }
  };

  const focusRow = (key) => {
    active = key;
    const tr = view.reach(key);
    markActive();
    tr?.focus({ preventScroll: true });
  };

  const move = (from, by) => {
    const rows = rowsShown();
    const at = rows.findIndex((item) => item.key === from);
    return rows[Math.min(rows.length - 1, Math.max(0, at + by))];
  };

  view.root.addEventListener("focusin", (event) => {
    const tr = event.target.closest("tr.wb-layer");
    if (tr) {
      active = tr.dataset.key;
      markActive();
    }
  });

  view.root.addEventListener("keydown", (event) => {
    const tr = event.target.closest("tr.wb-layer");
    if (!tr) return;
    const item = view.items().find((one) => one.key === tr.dataset.key);
    const done = event.target === tr ? onRow(event, item) : inCell(event, tr, item);
    if (done) {
      event.preventDefault();
      event.stopPropagation();
    }
  });

  const PACE = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 };

  const onRow = (event, { key, node }) => {
    const fold = node.children.length > 0;
    if (event.key in PACE) {
      const next = move(key, PACE[event.key]);
      if (event.shiftKey) {
        if (!selected.has(key)) choose(key, false);
        choose(next.key, true);
      }
      focusRow(next.key);
    } else if (event.key === " ") choose(key, event.shiftKey);
    else if (fold && (event.key === "Enter" || event.key === (open.has(key) ? "ArrowLeft" : "ArrowRight"))) page.toggle(node);
    else if (event.key === "ArrowLeft" && node.parent && !filter) focusRow(node.parent.key);
    else if (event.key === "Enter" || event.key === "F2" || event.key === "ArrowRight") controls(event.currentTarget.querySelector(`[data-key="${key}"]`))[0]?.focus();
    else if (event.key === "Escape" && selected.size) { selected = new Set(); refresh(); }
    else return false;
    return true;
  };

  // In a cell arrow keys are the control's own; with Ctrl they go to the same one of another row.
  const inCell = (event, tr, { key }) => {
    if (event.key === "Escape" && !event.defaultPrevented) focusRow(key);
    else if (event.ctrlKey && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
      const column = [...tr.children].indexOf(event.target.closest("td, th"));
      const next = view.reach(move(key, PACE[event.key]).key);
      const control = controls(next.children[column])[0];
      (control ?? next).focus();
    } else return false;
    return true;
  };

  const draw = ({ begins }) => {
    if (begins) {
      roots = plant(store.state.static.nodes);
      open = new Set();
      selected = new Set();
    }
    list();
  };

  return {
    root,
    draw,
    close: view.close,
    setFilter: (text) => { filter = text.trim(); selected = new Set(); view.root.scrollTop = 0; list(); return rowsShown().length; },
    foldAll: (folded) => { open = new Set(folded ? [] : everyFold(roots)); list(); },
    hasFolds: () => everyFold(roots).length > 0,
    show: (layer) => {
      const reveal = (nodes) => nodes.some((node) => {
        if (!node.layers.includes(layer)) return false;
        if (node.children.length) { open.add(node.key); reveal(node.children); } else active = node.key;
        return true;
      });
      reveal(roots);
      list();
      focusRow(active);
    },
  };
}

const controls = (node) => [...node.querySelectorAll("select, input:not([tabindex='-1']), button:not([tabindex='-1'])")].filter((one) => !one.hidden);

// Long module paths by their end, which tells them apart; what they begin with is in the title.
function nameIn({ label, children, parent }) {
  if (label.length <= 24) return label;
  const parts = label.split(".");
  return parts.slice(children.length ? -2 : parent?.kind === "like" ? -3 : 0).join(".");
}

// "layer3.1 … layer3.35: conv1"
function path(node) {
  return node.parent ? `${path(node.parent)}: ${node.label}` : node.label;
}
