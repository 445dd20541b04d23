// What the plan costs as a whole, and what the last edit changed of that.

import { element, setText } from "../element.js";
import { digits, milliseconds, size } from "../units.js";
import { shorten } from "./cells.js";

// Less is better, but of samples per second.
const FIGURES = [
  { name: "step_s", label: "Step time", show: milliseconds, needs: "machine" },
  { name: "samples_per_s", label: "Samples per second", show: digits, needs: "machine", more: true },
  { name: "peak_bytes", label: "Memory of the fullest rank", show: size },
  { name: "received_bytes", label: "Received per rank and step", show: size },
];

const PARTS = {
  load: "--wb-gray", forward: "--wb-sky", loss: "--wb-gray", backward: "--wb-blue",
  communication: "--wb-orange", wait: "--wb-gray", update: "--wb-green", step: "--wb-gray",
};

export function summary(store, { onShow }) {
  const cards = FIGURES.map(card);
  const parts = element("div", { class: "wb-parts", role: "img" });
  const legend = element("ul", { class: "wb-legend" });
  const breakdown = element("div", { class: "wb-breakdown" }, parts, legend);
  const last = element("p", { class: "wb-last", role: "status" });
  const alert = element("div", { class: "wb-alert", role: "alert" });
  const notes = element("p", { class: "wb-notes" });
  const root = element("section", { class: "wb-summary", "aria-label": "prediction" },
    element("div", { class: "wb-cards" }, ...cards.map(({ root: one }) => one)), breakdown, alert, last, notes);

  const draw = () => {
    const { values } = store.state;
    const { predicted } = values;
    root.classList.toggle("wb-pending", Boolean(values.pending));
    root.setAttribute("aria-busy", String(Boolean(values.pending)));
    for (const one of cards) one.draw(predicted, values);
    drawParts(predicted);
    drawLast(values);
    const problems = [...new Set(Object.values(values.errors))];
    if (values.complaint) problems.push(`No prediction: ${values.complaint}`);
    if (store.quiet) problems.push("The kernel has not answered for 8 seconds: it is busy with a cell, or gone. What is shown is what it said last; after a restart, run the cell again.");
    alert.hidden = problems.length === 0;
    setText(alert, problems.length ? `${problems.join("\n")}${Object.keys(values.errors).length ? "\nThe plan stays as it was." : ""}` : "");
    const remarks = [...values.notes, ...(predicted?.notes ?? [])];
    notes.hidden = !remarks.length;
    setText(notes, remarks.join("\n"));
  };

  const drawParts = (predicted) => {
    const found = Object.entries(predicted?.step ?? {});
    breakdown.hidden = !found.length;
    const whole = found.reduce((sum, [, seconds]) => sum + seconds, 0);
    parts.replaceChildren(...found.map(([name, seconds]) => {
      const title = `${name} ${milliseconds(seconds)}`;
      return element("i", { title, style: `width: ${(100 * seconds) / whole}%; --wb-color: var(${PARTS[name]})` });
    }));
    parts.setAttribute("aria-label", `a step of rank ${predicted?.rank}: ${found.map(([n, s]) => `${n} ${milliseconds(s)}`).join(", ")}`);
    const large = found.filter(([, seconds]) => seconds > 0.005 * whole);
    legend.replaceChildren(
      element("li", {}, `a step of rank ${predicted?.rank}:`),
      ...large.map(([name, seconds]) => element("li", {},
        element("i", { style: `--wb-color: var(${PARTS[name]})` }), `${name} `, element("b", {}, milliseconds(seconds)))));
  };

  const drawLast = (values) => {
    last.replaceChildren();
    last.hidden = !values.last;
    if (!values.last) return;
    const { facts } = store.state.static;
    last.append(swatch("--wb-blue"), "Last edit: ", element("b", {}, values.last), ".");
    if (!values.also.length) return;
    last.append(" ", swatch("--wb-orange"), `It also changed ${values.also.length} other ${values.also.length === 1 ? "layer" : "layers"}: `);
    values.also.slice(0, 4).forEach((layer, i) => {
      const button = element("button", { type: "button", class: "wb-link", title: `show ${facts.name[layer]}` }, shorten(facts.name[layer]));
      button.addEventListener("click", () => onShow(layer));
      last.append(i ? ", " : "", button);
    });
    if (values.also.length > 4) last.append(` and ${values.also.length - 4} more`);
    last.append(".");
  };
  return { root, draw };
}

// The color that rows have at their left edge.
function swatch(color) {
  return element("i", { style: `--wb-color: var(${color})`, "aria-hidden": "true" });
}

function card({ name, label, show, needs, more }) {
  const value = element("b", {});
  const change = element("span", { class: "wb-change" });
  const root = element("div", { class: "wb-card", "data-figure": name }, element("span", { class: "wb-faint" }, label), value, change);
  const draw = (predicted, values) => {
    const now = predicted?.totals[name];
    const missing = needs && !values.machine;
    setText(value, now === undefined || now === null ? "–" : show(now));
    const before = predicted?.before?.[name];
    change.className = "wb-change";
    if (missing) {
      setText(change, values.can.measure === "" ? "measure the cluster to know it, below" : "needs a machine: editor.machine = wb.Machine.preset(…)");
      change.title = `needs a machine: ${values.can.suggest}`;
      return;
    }
    change.title = "";
    if (now === undefined) return setText(change, "predicting …");
    if (before === undefined || before === null) return setText(change, " ");
    const off = now - before;
    if (Math.abs(off) <= 5e-4 * Math.abs(before)) return setText(change, "as before the edit");
    const better = more ? off > 0 : off < 0;
    change.classList.add(better ? "wb-better" : "wb-worse");
    const ratio = now / before;
    const percent = !before ? "" : ratio > 2 ? ` (×${digits(ratio)})` : ` (${Math.abs(100 * (ratio - 1)).toFixed(1)} %)`;
    setText(change, `${off < 0 ? "▼" : "▲"} ${show(Math.abs(off))}${percent} ${better ? "better" : "worse"}`);
  };
  return { root, draw };
}
