// Making and changing elements, and the legend that every panel has.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text; // else a screen reader says it again
}

// Else a notebook takes keys for its own: "d d" would delete the cell.
export function keepKeys(root) {
  root.addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey || event.altKey)) event.stopPropagation();
  });
}

// Entries are [{label, color}]; `color` names a custom property of dashboard.css.
export function legend(entries) {
  const values = entries.map(() => element("b", {}, "–"));
  const list = element(
    "ul",
    { class: "wb-legend" },
    ...entries.map(({ label, color, kind = "wb-swatch" }, i) =>
      element(
        "li",
        {},
        element("i", { class: kind, style: `--wb-color: var(${color})` }),
        `${label} `,
        values[i],
      ),
    ),
  );
  const set = (texts) => texts.forEach((text, i) => { values[i].textContent = text; });
  return { list, set };
}

export function panel(title, entries, body) {
  const { list, set } = legend(entries);
  const note = element("span", { class: "wb-note" });
  const heading = element("div", { class: "wb-heading" }, element("h4", {}, title), note);
  const root = element("section", { class: "wb-panel", "aria-label": title }, heading, list, body);
  return { root, setLegend: set, note };
}
