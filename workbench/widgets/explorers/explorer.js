// An explorer's drawing: what the pictures say, the pictures, and the same in figures.

import "../theme.css";
import "./explorer.css";
import { element, keepKeys, setText } from "../element.js";
import { liveWidget, QUIET } from "../live.js";
import { figures, panels } from "./panels.js";

export default liveWidget((live, el) => {
  const title = element("h3", {});
  const alert = element("p", { class: "wb-alert", role: "alert" });
  const busy = element("p", { class: "wb-busy", role: "status" });
  const said = element("div", { class: "wb-said", role: "status" });
  const grid = panels(live);
  const table = figures();
  const root = element("section", { class: "wb-widget wb-explorer", "aria-label": "explorer" },
    title, alert, busy, said, grid.root, table.root);
  el.append(root);

  let drawn = 0;
  const draw = () => {
    const { view } = live;
    setText(title, view.title);
    const wrong = [live.quiet ? QUIET : "", view.error].filter(Boolean).join("\n");
    setText(alert, wrong);
    alert.hidden = !wrong;
    setText(busy, view.busy);
    busy.hidden = !view.busy;
    const texts = view.said.join("\n");
    if (said.dataset.texts !== texts) {
      said.dataset.texts = texts;
      said.replaceChildren(...view.said.map((text) => element("p", {}, text)));
    }
    grid.draw(view.panels);
    table.draw(view.table);
    root.dataset.drawn = ++drawn;
    root.dataset.busy = view.busy;
  };
  keepKeys(root);
  live.listeners.add(draw);
  draw();
  return () => live.listeners.delete(draw);
});
