// What happened to the run, the newest first.

import { element, panel } from "../element.js";

const SHOWN = 100;
const SIGNS = { info: "", warning: "▲ ", error: "✕ " };

export function eventsPanel() {
  const list = element("ol", { class: "wb-events", role: "log", "aria-label": "events", tabindex: "0" });
  const { root, note } = panel("Events", [], list);
  let known = null;

  const draw = ({ events }) => {
    if (events === known) return;
    known = events;
    note.textContent = events.length > SHOWN ? `the last ${SHOWN}` : "";
    const lines = events.slice(-SHOWN).reverse().map(([time, level, text]) =>
      element("li", { class: `wb-${level}` },
        element("time", {}, time === null ? "" : new Date(1000 * time).toLocaleTimeString()),
        element("span", {}, `${SIGNS[level] ?? ""}${text}`)));
    if (!lines.length) lines.push(element("li", { class: "wb-nothing" }, "Nothing has happened yet."));
    list.replaceChildren(...lines);
  };
  return { root, draw };
}
