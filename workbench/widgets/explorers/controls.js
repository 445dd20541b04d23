// What can be moved. A control stays the same element, so that it keeps the focus.

import { element } from "../element.js";

export function controls(live) {
  const root = element("div", { class: "wb-controls", role: "group", "aria-label": "what the picture depends on" });
  const made = new Map();
  const make = { slider, choice, button };

  const draw = (specs) => {
    const names = specs.map((spec) => `${spec.kind}:${spec.name}`);
    for (const [name, control] of made) {
      if (!names.includes(name)) {
        control.root.remove();
        made.delete(name);
      }
    }
    specs.forEach((spec, index) => {
      if (!made.has(names[index])) {
        const control = make[spec.kind](live, spec);
        made.set(names[index], control);
        root.insertBefore(control.root, root.children[index] ?? null);
      }
      made.get(names[index]).draw(spec);
    });
    root.hidden = specs.length === 0;
  };
  return { root, draw };
}

let count = 0;

function labelled(spec, control, value) {
  const reason = element("span", { class: "wb-reason", id: `wb-reason-${count++}`, role: "tooltip" });
  const root = element("div", { class: "wb-control", "data-name": spec.name },
    element("label", {}, element("span", {}, spec.label), control), value, reason);
  const drawReason = (text) => {
    if (reason.textContent !== text) reason.textContent = text;
    reason.hidden = !text;
    root.classList.toggle("wb-refused", Boolean(text));
    if (text) {
      control.setAttribute("aria-invalid", "true");
      control.setAttribute("aria-describedby", reason.id);
    } else {
      control.removeAttribute("aria-invalid");
      control.removeAttribute("aria-describedby");
    }
  };
  return { root, drawReason };
}

function slider(live, spec) {
  const input = element("input", { type: "range", min: 0, max: spec.most, step: 1, "aria-label": spec.label });
  const text = element("output", {});
  const { root, drawReason } = labelled(spec, input, text);
  let asked = 0;
  input.addEventListener("input", () => {
    asked = performance.now();
    live.ask({ type: "set", name: spec.name, value: Number(input.value) }, spec.name);
  });
  const draw = (now) => {
    if (input.max !== String(now.most)) input.max = now.most;
    // While it is dragged, it is ahead of the kernel.
    const dragged = document.activeElement === input && performance.now() - asked < 400;
    if (!dragged) input.value = now.at;
    input.setAttribute("aria-valuetext", now.text);
    if (text.textContent !== now.text) text.textContent = now.text;
    drawReason(now.error);
  };
  return { root, draw };
}

function choice(live, spec) {
  const select = element("select", { "aria-label": spec.label });
  const { root, drawReason } = labelled(spec, select, "");
  let known = "";
  select.addEventListener("change", () => live.ask({ type: "set", name: spec.name, value: select.value }));
  const draw = (now) => {
    const options = now.options.join("\n");
    if (options !== known) {
      known = options;
      select.replaceChildren(...now.options.map((option) => element("option", { value: option }, option)));
    }
    if (select.value !== now.at) select.value = now.at;
    drawReason(now.error);
  };
  return { root, draw };
}

function button(live, spec) {
  const press = element("button", { type: "button" }, spec.label);
  const root = element("div", { class: "wb-control", "data-name": spec.name }, press);
  press.addEventListener("click", () => live.ask({ type: "press", name: spec.name }));
  const draw = (now) => {
    if (press.textContent !== now.label) press.textContent = now.label;
    press.disabled = Boolean(now.why_not);
    press.title = now.why_not || now.error;
  };
  return { root, draw };
}
