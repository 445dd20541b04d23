// What takes longer: suggest, verify, measure, apply, and files. Each says how it went.

import { element, setText } from "../element.js";
import { front } from "./front.js";

function outcome(tag = "p") {
  const node = element(tag, { class: "wb-outcome", role: "status" });
  const draw = (task) => {
    node.hidden = !task;
    node.className = `wb-outcome ${!task ? "" : task.state === "failed" || task.good === false ? "wb-bad" : task.state === "done" ? "wb-good" : "wb-busy"}`;
    const sign = !task ? "" : task.state === "failed" || task.good === false ? "✕ " : task.state === "done" ? "✓ " : task.state === "running" ? "◌ " : "";
    setText(node, task ? `${sign}${[task.text, task.advice].filter(Boolean).join("\n")}` : "");
  };
  return { node, draw };
}

export function tasks(store) {
  const press = (text, type, extra = () => ({})) => {
    const button = element("button", { type: "button" }, text);
    button.addEventListener("click", () => store.send({ type, ...extra() }));
    return button;
  };
  const box = (title, ...children) => element("section", { class: "wb-panel", "aria-label": title },
    element("div", { class: "wb-heading" }, element("h4", {}, title)), ...children);

  const limit = element("input", { type: "text", size: 9, placeholder: "the device's", "aria-label": "memory limit of a rank", title: "such as 2GiB" });
  const suggest = press("Suggest plans", "suggest", () => ({ limit: limit.value }));
  const searched = outcome();
  const chart = front({ onTake: (index) => store.send({ type: "take", index }) });
  const suggesting = box("Suggest",
    element("div", { class: "wb-tools" }, suggest, element("label", {}, element("span", {}, "memory limit"), limit)),
    searched.node, chart.root);

  const path = element("input", { type: "text", size: 24, placeholder: "plan.toml", "aria-label": "path of a plan" });
  const named = () => ({ path: path.value });
  const [save, load] = [press("Save", "save", named), press("Load", "load", named)];
  const files = [outcome(), outcome()];
  const verify = press("Verify on the cluster", "verify");
  const measure = press("Measure the cluster", "measure");
  const apply = press("Apply to the run", "apply");
  const outcomes = { verify: outcome(), measure: outcome(), apply: outcome(), editor: outcome() };
  const needs = element("p", { class: "wb-faint" });
  const running = box("Check, run, keep",
    element("div", { class: "wb-tools" }, verify, measure, apply), needs,
    ...Object.values(outcomes).map(({ node }) => node),
    element("div", { class: "wb-tools" }, element("label", {}, element("span", {}, "file"), path), save, load),
    ...files.map(({ node }) => node));

  const draw = () => {
    const { tasks, can } = store.state.values;
    const able = (button, name) => {
      button.disabled = Boolean(can[name]) || tasks[name]?.state === "running";
      button.title = can[name] ? `${name} ${can[name]}` : "";
    };
    able(suggest, "suggest");
    able(verify, "verify");
    able(measure, "measure");
    able(apply, "apply");
    // Of what cannot be had, the reason is said once and not only in a title.
    const reasons = [can.verify && `Verify ${can.verify}.`, can.apply && `Apply ${can.apply}.`].filter(Boolean);
    needs.hidden = !reasons.length;
    setText(needs, reasons.join(" "));
    searched.draw(tasks.suggest ?? (can.suggest ? { state: "idle", text: can.suggest } : null));
    chart.draw(tasks.suggest, store.state.values.predicted?.totals);
    for (const [name, one] of Object.entries(outcomes)) one.draw(tasks[name]);
    files[0].draw(tasks.save);
    files[1].draw(tasks.load);
  };
  return { parts: [suggesting, running], draw };
}
