// The plan editor's view: totals, the plan's own fields, the table of layers, devices, tasks.

import "../theme.css";
import "./editor.css";
import { element, setText } from "../element.js";
import { holdingsPanel, memoryPanel } from "./devices.js";
import { tasks } from "./tasks.js";
import { openStore } from "./store.js";
import { summary } from "./summary.js";
import { layerTable } from "./table.js";
import { toolbar } from "./toolbar.js";

export default () => {
  let store;

  function initialize({ model }) {
    const opened = openStore(model);
    store = opened.store;
    return opened.close;
  }

  function render({ el }) {
    const title = element("h3", {});
    const table = layerTable(store);
    const totals = summary(store, { onShow: table.show });
    const tools = toolbar(store, table);
    const memory = memoryPanel(store);
    const holdings = holdingsPanel(store);
    const services = tasks(store);
    const rest = element("div", { class: "wb-grid" }, memory.root, holdings.root, ...services.parts);
    const root = element("section", {
      class: "wb-widget wb-editor",
      "aria-label": "plan editor",
    }, title, totals.root, tools.setting, tools.looking, table.root, rest);
    el.append(root);

    const draw = (change) => {
      const { values, static: { model, facts } } = store.state;
      const machine = values.machine ? ` on ${values.machine}` : "";
      setText(title, `${model}: ${facts.name.length.toLocaleString("en-US")} layers over ${values.world_size.toLocaleString("en-US")} ${values.world_size === 1 ? "rank" : "ranks"}${machine}`);
      totals.draw();
      tools.draw();
      table.draw(change);
      memory.draw();
      holdings.draw();
      services.draw();
      Object.assign(root.dataset, {
        version: store.state.version,
        pending: String(Boolean(values.pending)),
        errors: Object.keys(values.errors).length,
      });
    };
    root.addEventListener("keydown", (event) => {
      // Else a notebook takes them for its own: "d d" would delete the cell.
      if (!(event.ctrlKey || event.metaKey || event.altKey)) event.stopPropagation();
      const letter = event.key.toLowerCase();
      const typing = event.target.matches("input:not([type='checkbox'])"); // which has its own
      if (!(event.ctrlKey || event.metaKey) || typing || (letter !== "z" && letter !== "y")) return;
      event.preventDefault();
      event.stopPropagation();
      store.send({ type: letter === "y" || event.shiftKey ? "redo" : "undo" });
    });
    store.listeners.add(draw);
    draw({ begins: false });
    return () => {
      store.listeners.delete(draw);
      table.close();
    };
  }
  return { initialize, render };
};
