// The dashboard's view: a header, controls, charts over the step, bars over the ranks, a step in time.

import "uplot/dist/uPlot.min.css";
import "../theme.css";
import "./dashboard.css";
import { element, keepKeys } from "../element.js";
import { controls } from "./controls.js";
import { eventsPanel } from "./events.js";
import { openFeed } from "./feed.js";
import { header } from "./header.js";
import { lossPanel, speedPanel } from "./learning.js";
import { paintWhenSeen } from "./paint.js";
import { clockPanel, linksPanel, memoryPanel } from "./ranks.js";
import { timelinePanel } from "./timeline.js";

const THEMES = ["data-jp-theme-light", "data-jp-theme-name", "class"];

export default () => {
  let feed;
  let views = 0;

  function initialize({ model }) {
    const opened = openFeed(model);
    feed = opened.feed;
    return opened.close;
  }

  function render({ model, el }) {
    const syncKey = `wb-${model.get("_anywidget_id")}-${views++}`;
    const top = header(feed);
    const tools = controls(feed);
    const [loss, speed] = [lossPanel(syncKey), speedPanel(syncKey)];
    const [memory, clock, links] = [memoryPanel(), clockPanel(), linksPanel()];
    const [events, timeline] = [eventsPanel(), timelinePanel(feed)];
    const panels = [loss, speed, memory, clock, links, events, timeline];
    const grid = element("div", { class: "wb-grid" }, ...panels.map((panel) => panel.root));
    const root = element("section", { class: "wb-widget wb-dashboard", "aria-label": "training run" }, ...top.parts, ...tools.parts, grid);
    el.append(root);
    keepKeys(root);

    let frames = 0;
    const draw = () => {
      const { status, points } = feed.runs[feed.shown];
      top.draw();
      tools.draw();
      const remark = status.stride > 1 ? `a point is ${status.stride} steps` : "";
      loss.draw(feed, remark);
      speed.draw(feed, remark);
      for (const panel of [memory, clock, links, events, timeline]) panel.draw(feed);
      Object.assign(root.dataset, {
        run: feed.runs[feed.shown].name,
        state: status.stopping ? "stopping" : status.state,
        done: status.done,
        points: points.step.length,
        messages: feed.messages,
        frames: ++frames,
      });
    };
    const painter = paintWhenSeen(root, draw);
    feed.listeners.add(painter.request);
    const clockwork = setInterval(top.tick, 1000);
    const repainted = [loss, speed, timeline];
    const theme = new MutationObserver(() => repainted.forEach((panel) => panel.repaint()));
    theme.observe(document.body, { attributes: true, attributeFilter: THEMES });

    return () => {
      feed.listeners.delete(painter.request);
      painter.close();
      clearInterval(clockwork);
      theme.disconnect();
      for (const panel of panels) panel.close?.();
    };
  }
  return { initialize, render };
};
