// One row: a layer, or a fold of layers that are edited together.

import { element, setText } from "../element.js";
import { milliseconds, size } from "../units.js";
import { bar, choice, field, mark, shorten } from "./cells.js";
import { common, total } from "./tree.js";

let made = 0;

// page: {state(), changed(layers), edit(node, field, value), toggle(node), select(node, event), longest()}
export function layerRow(page, first) {
  const id = `wb-row-${made++}`;
  let node = first.node;
  let drawn = []; // what the row was drawn for; empty once a person has changed something in it
  const name = page.describe(node);
  const check = element("input", { type: "checkbox", "aria-label": `select ${name}`, tabindex: "-1" });
  check.addEventListener("click", (event) => { drawn = []; page.select(node, event); });
  const toggle = element("button", { class: "wb-toggle", type: "button", tabindex: "-1", "aria-label": `layers of ${name}` });
  toggle.addEventListener("click", () => page.toggle(node));
  const label = element("span", { class: "wb-name" });
  const badge = element("span", { class: "wb-badge" });
  const edit = (what) => (value) => { drawn = []; page.edit(node, what, value); };
  const scheme = choice(`scheme, ${name}`, edit("scheme"));
  const group = choice(`group, ${name}`, (value) => edit("group")(Number(value)));
  const shares = field(`shares, ${name}`, "equal", edit("shares"));
  const again = element("input", { type: "checkbox", "aria-label": `recompute, ${name}` });
  again.addEventListener("change", () => edit("recompute")(again.checked));
  const follows = element("span", { class: "wb-faint" });
  const memory = bar(["--wb-blue"]);
  const time = bar(["--wb-green", "--wb-orange"]);
  const traffic = bar(["--wb-vermilion", "--wb-sky"]);
  const td = (className, ...children) => element("td", { class: className }, ...children);
  const cells = {
    check: td("wb-check", check),
    kind: td("wb-kind"),
    shape: td("wb-shape"),
    parameters: td("wb-number"),
    scheme: td("wb-scheme", scheme.node, follows),
    group: td("wb-group", group.node),
    shares: td("wb-shares", shares.node),
    recompute: td("wb-recompute", again),
    memory: td("wb-figure", memory.node),
    time: td("wb-figure", time.node),
    traffic: td("wb-figure", traffic.node),
  };
  const { check: checkCell, ...others } = cells;
  const heading = element("th", { scope: "row" }, element("div", { class: "wb-label" }, toggle, label, badge));
  const tr = element("tr", { class: "wb-layer", tabindex: "-1" }, checkCell, heading, ...Object.values(others));

  const update = (item) => {
    const looks = look(page, item);
    if (drawn.length && looks.every((one, i) => one === drawn[i])) return;
    drawn = looks;
    node = item.node;
    const state = page.state();
    const { facts } = state.static;
    const { columns, values } = state;
    const { layers } = node;
    const leaf = node.children.length === 0;
    const text = page.describe(node);
    tr.dataset.key = node.key;
    tr.dataset.name = text;
    tr.dataset.kind = node.kind ?? "layer";
    tr.classList.toggle("wb-chosen", page.isSelected(node));
    tr.classList.toggle("wb-edited", layers.some((layer) => page.edited.has(layer)));
    tr.classList.toggle("wb-also", layers.some((layer) => page.also.has(layer)));
    heading.title = tr.classList.contains("wb-edited") ? "changed by the last edit" : tr.classList.contains("wb-also") ? "placed otherwise because of the last edit" : "";
    tr.setAttribute("aria-level", item.depth + 1);
    tr.setAttribute("aria-selected", String(page.isSelected(node)));
    check.checked = page.isSelected(node);
    heading.style.setProperty("--wb-depth", item.depth);
    toggle.hidden = leaf;
    const open = String(page.isOpen(node));
    toggle.setAttribute("aria-expanded", open);
    if (!leaf) tr.setAttribute("aria-expanded", open);
    setText(toggle, open === "true" ? "▾" : "▸");
    setText(label, shorten(page.label(node, item)));
    label.title = text;
    setText(badge, summary(node, columns));
    badge.title = badge.textContent && `stands for ${layers.length} layers${badge.textContent.includes("⇄") ? "; ⇄: layers whose input is converted" : ""}`;
    setText(cells.kind, leaf || node.kind === "like" ? facts.kind[layers[0]].replaceAll("_", " ") : `${layers.length} layers`);
    const shape = leaf || node.kind === "like" ? facts.output[layers[0]] : "";
    setText(cells.shape, shape);
    cells.shape.title = shape && `${facts.input[layers[0]]} → ${shape}, for one sample`;
    const parameters = layers.reduce((sum, layer) => sum + facts.parameters[layer], 0);
    setText(cells.parameters, parameters ? parameters.toLocaleString("en-US") : "");

    const split = layers.filter((layer) => facts.schemes[layer].length);
    const cut = split.filter((layer) => columns.scheme[layer] !== "replicate");
    scheme.node.hidden = !split.length;
    group.node.hidden = !cut.length;
    shares.node.hidden = !cut.some((layer) => columns.scheme[layer] !== "duplicate");
    if (split.length) {
      const options = [...new Set(split.flatMap((layer) => facts.schemes[layer]))];
      scheme.update(options, common(columns.scheme, split));
    }
    setText(follows, !split.length && leaf ? layout(columns.follows[layers[0]]) : "");
    follows.title = leaf ? `follows its input: ${columns.follows[layers[0]]}` : "";
    if (cut.length) {
      group.update(values.groups, common(columns.group, cut), "mixed");
      const given = common(columns.shares, cut);
      shares.update(given ?? "", Boolean(values.errors[`${cut[0]}:shares`]));
      const pieces = common(columns.pieces, cut);
      shares.node.placeholder = given === null ? "mixed" : "equal";
      shares.node.title = pieces ? `pieces: ${pieces}` : "relative sizes of the pieces, such as 3 1";
    }
    const seen = layers.filter((layer) => facts.samples[layer]);
    again.hidden = !seen.length;
    const recomputed = seen.filter((layer) => columns.recompute[layer]).length;
    again.checked = recomputed > 0 && recomputed === seen.length;
    again.indeterminate = recomputed > 0 && recomputed < seen.length;
    again.title = leaf && columns.segment[layers[0]] ? `segment ${columns.segment[layers[0]]}` : "compute its forward pass again in backward";

    drawBars(state, layers);
    const reason = (what) => layers.map((layer) => values.errors[`${layer}:${what}`]).find(Boolean);
    mark(cells.scheme, scheme.node, reason("scheme"), `${id}-scheme`);
    mark(cells.group, group.node, reason("group"), `${id}-group`);
    mark(cells.shares, shares.node, reason("shares"), `${id}-shares`);
    mark(cells.recompute, again, reason("recompute"), `${id}-recompute`);
  };

  const drawBars = (state, layers) => {
    const longest = page.longest();
    const of = (column) => total(state, column, layers);
    const bytes = of("memory");
    memory.update([bytes ?? 0], longest.memory, bytes === undefined ? "…" : bytes ? size(bytes) : "",
      bytes ? `${size(bytes)} at the rank's highest point` : "");
    const [work, exchange] = [of("work_s") ?? 0, of("exchange_s") ?? 0];
    time.update([work, exchange], longest.time, work + exchange ? milliseconds(work + exchange) : "",
      `computes ${milliseconds(work)}, communicates ${milliseconds(exchange)}`);
    const [moved, summed] = [of("moved") ?? 0, of("summed") ?? 0];
    traffic.update([moved, summed], longest.traffic, moved + summed ? size(moved + summed) : "",
      `received: ${size(moved)} of activations, ${size(summed)} of gradients and weights`);
  };
  return { tr, update };
}

// Everything that a row shows depends on: most rows stay as they are when one layer changes.
function look(page, item) {
  const { node } = item;
  const { values } = page.state();
  const { memory, time, traffic } = page.longest();
  const some = (layers) => node.layers.some((layer) => layers.has(layer));
  return [node, item.depth, page.changed(node.layers), page.isSelected(node), page.isOpen(node), page.label(node, item),
    some(page.edited), some(page.also), values.errors, values.groups, memory, time, traffic];
}

// Where a fold hides conversions, their number.
function summary(node, columns) {
  if (!node.children.length) return "";
  const moved = node.layers.filter((layer) => columns.arrives[layer].length).length;
  const times = node.kind === "stack" ? ` ×${node.count} blocks` : node.kind === "like" ? ` ×${node.count}` : "";
  return `${times}${moved ? ` ⇄${moved}` : ""}`;
}

function layout(text) {
  return text.replace(/S\((\d+): .*\) over (\d+)/, "cut in $2").replace(/R over (\d+)/, "whole, group of $1");
}

// What is converted before a layer reads it, and what that brings to the rank.
export function conversionRow(page, first, columns) {
  const words = element("span", { class: "wb-words" });
  const cost = element("span", { class: "wb-cost" });
  const line = element("div", { class: "wb-crossing" }, element("i", { "aria-hidden": "true" }, "⇄"), words, cost);
  const tr = element("tr", { class: "wb-conversion" }, element("td", {}), element("td", { colspan: columns - 1 }, line));
  const update = ({ node, depth }) => {
    const { columns: of, static: { facts } } = page.state();
    const steps = of.arrives[node.layer];
    const text = [...new Set(steps.map(readable))].join(", then ");
    setText(words, shorten(text, 90));
    tr.title = `${facts.name[node.layer]} reads: ${steps.join("; ")}`;
    const there = of.forward?.[node.layer] ?? 0;
    const back = of.backward?.[node.layer] ?? 0;
    const known = of.forward !== undefined;
    const none = text.startsWith("sums gradients") || text.startsWith("slices") ? "" : "nothing new received";
    setText(cost, !known ? "" : there + back ? `${size(there)} forward, ${size(back)} backward` : none);
    tr.dataset.layer = facts.name[node.layer];
    line.style.setProperty("--wb-depth", depth);
  };
  return { tr, update };
}

const WORDS = {
  copy_to: "sums gradients",
  all_reduce: "all-reduce",
  reduce_scatter_rows: "reduce-scatter into rows",
  reduce_scatter_features: "reduce-scatter into features",
  reduce_scatter_tokens: "reduce-scatter into tokens",
  all_gather_rows: "all-gather of rows",
  all_gather_features: "all-gather of features",
  all_gather_tokens: "all-gather of tokens",
  slice_rows: "slices rows",
  slice_features: "slices features",
  slice_tokens: "slices tokens",
  all_to_all: "all-to-all",
};

function readable(step) {
  const [, name, group, producer] = step.match(/^(\S+) over (\d+) of (.*)$/);
  return `${WORDS[name] ?? name} in groups of ${group}, from ${shorten(producer, 40)}`;
}
