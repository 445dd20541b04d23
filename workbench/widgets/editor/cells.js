// The cells of a row: what can be chosen, and bars with their numbers.

import { element, setText } from "../element.js";

// A select whose options change; `null` is shown as "mixed".
export function choice(label, onPick) {
  const select = element("select", { "aria-label": label });
  let known = "";
  select.addEventListener("change", () => onPick(select.value));
  const update = (options, value, mixed = "mixed") => {
    const every = value === null ? ["", ...options] : options;
    const texts = every.map((option) => (option === "" ? mixed : String(option)));
    const now = texts.join("\n");
    if (now !== known) {
      known = now;
      select.replaceChildren(...every.map((option, i) => element("option", { value: option }, texts[i])));
    }
    const wanted = value === null ? "" : String(value);
    if (select.value !== wanted) select.value = wanted;
  };
  return { node: select, update };
}

// A text field that sends when it is left or on Enter, and takes back on Escape.
export function field(label, placeholder, onSend, attributes = {}) {
  const input = element("input", { type: "text", "aria-label": label, placeholder, spellcheck: "false", ...attributes });
  let shown = "";
  const send = () => {
    if (input.value !== shown) onSend(input.value);
  };
  input.addEventListener("change", send);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && input.value !== shown) {
      input.value = shown;
      event.stopPropagation();
    }
  });
  // What was refused stays in the field, beside its reason, until something else is shown.
  const update = (value, refused = false) => {
    if (!refused && (shown !== value || document.activeElement !== input)) input.value = value;
    shown = value;
  };
  return { node: input, update };
}

// A number over a bar of one or two parts, each with its share of the longest bar.
export function bar(colors) {
  const parts = colors.map((color) => element("i", { style: `--wb-color: var(${color})` }));
  const text = element("span", {});
  const node = element("div", { class: "wb-bar" }, ...parts, text);
  const update = (values, longest, words, title) => {
    parts.forEach((part, i) => {
      const width = longest > 0 && values[i] > 0 ? `${((100 * values[i]) / longest).toFixed(1)}%` : "0";
      if (part.style.width !== width) part.style.width = width;
    });
    setText(text, words);
    node.classList.toggle("wb-none", words === "");
    node.title = title;
  };
  return { node, update };
}

// Marks a cell with why its value cannot be.
export function mark(td, control, reason, id) {
  const tip = td.querySelector(".wb-reason");
  td.classList.toggle("wb-refused", Boolean(reason));
  if (!reason) {
    tip?.remove();
    control.removeAttribute("aria-invalid");
    control.removeAttribute("aria-describedby");
    return;
  }
  const said = tip ?? element("span", { class: "wb-reason", role: "tooltip", id });
  setText(said, reason);
  if (!tip) td.append(said);
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-describedby", id);
}

export function shorten(text, most = 46) {
  if (text.length <= most) return text;
  const half = Math.floor((most - 1) / 2);
  return `${text.slice(0, half)}…${text.slice(text.length - half)}`;
}
