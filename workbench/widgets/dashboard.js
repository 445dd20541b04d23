// The dashboard's view: a header, two charts over the step, two sets of bars over the ranks.

import "uplot/dist/uPlot.min.css";
import "./theme.css";
import "./dashboard.css";
import { average, barPanel, known, largest } from "./bars.js";
import { element } from "./element.js";
import { openFeed } from "./feed.js";
import { header } from "./header.js";
import { plotPanel } from "./plot.js";
import { digits, milliseconds, percent, size } from "./units.js";

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
    const top = header(feed, { onStop: () => model.send({ type: "stop" }) });
    const loss = lossPanel(syncKey);
    const speed = speedPanel(syncKey);
    const memory = memoryPanel();
    const clock = clockPanel();
    const grid = element("div", { class: "wb-grid" }, loss.root, speed.root, memory.root, clock.root);
    const root = element("section", { class: "wb-widget wb-dashboard", "aria-label": "training run" }, ...top.parts, grid);
    el.append(root);

    let frames = 0;
    const draw = () => {
      top.draw();
      const remark = feed.status.stride > 1 ? `a point is ${feed.status.stride} steps` : "";
      loss.draw(feed.points, remark);
      speed.draw(feed.points, remark);
      memory.draw(feed.ranks);
      memory.note.textContent = feed.ranks.some((rank) => rank.onGpu) ? "on the GPU" : "of tensors";
      clock.draw(feed.ranks);
      clock.note.textContent = `mean of the last ${feed.status.recent} steps`;
      Object.assign(root.dataset, {
        state: feed.status.stopping ? "stopping" : feed.status.state,
        done: feed.status.done,
        points: feed.points.step.length,
        messages: feed.messages,
        frames: ++frames,
      });
    };
    const painter = paintWhenSeen(root, draw);
    feed.listeners.add(painter.request);
    const clockwork = setInterval(() => top.tick(), 1000);
    const theme = new MutationObserver(() => [loss, speed].forEach((chart) => chart.repaint()));
    theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class"] });

    return () => {
      feed.listeners.delete(painter.request);
      painter.close();
      clearInterval(clockwork);
      theme.disconnect();
      loss.close();
      speed.close();
    };
  }
  return { initialize, render };
};

// At most one drawing for each frame, and none while nobody can see it.
function paintWhenSeen(root, draw) {
  let frame = 0;
  let seen = false;
  let stale = true;
  const request = () => {
    stale = true;
    if (seen && !frame) {
      frame = requestAnimationFrame(() => {
        frame = 0;
        stale = false;
        draw();
      });
    }
  };
  const watcher = new IntersectionObserver((entries) => {
    seen = entries.at(-1).isIntersecting;
    if (seen && stale) request();
  });
  watcher.observe(root);
  const close = () => {
    watcher.disconnect();
    cancelAnimationFrame(frame);
  };
  return { request, close };
}

const plain = (value) => value.toLocaleString("en-US");

function lossPanel(syncKey) {
  return plotPanel({
    title: "Loss and accuracy",
    syncKey,
    curves: [
      { name: "loss", label: "loss", color: "--wb-blue", axis: "loss", format: digits },
      { name: "accuracy", label: "test accuracy", color: "--wb-vermilion", axis: "accuracy", format: percent, dots: true },
    ],
    axes: {
      loss: { label: "loss", side: 3, color: "--wb-blue", ticks: plain },
      accuracy: { label: "test accuracy (%)", side: 1, max: 1, color: "--wb-vermilion", ticks: (v) => `${Math.round(100 * v)}` },
    },
  });
}

function speedPanel(syncKey) {
  return plotPanel({
    title: "Throughput",
    syncKey,
    curves: [
      { name: "samples_per_s", label: "samples/s", color: "--wb-green", axis: "speed", format: digits, fill: true },
    ],
    axes: { speed: { label: "samples/s", side: 3, ticks: plain } },
  });
}

function memoryPanel() {
  return barPanel({
    title: "Memory per rank",
    valueWidth: "10em",
    parts: [{ name: "now", label: "now", color: "--wb-sky" }],
    mark: { name: "peak", label: "peak", color: "--wb-ink" },
    text: ({ now, peak }) => `${size(now)} / ${size(peak)}`,
    describe: ({ now, peak, onGpu }) => `${onGpu ? "GPU" : "tensors"} now ${size(now)}, peak ${size(peak)}`,
    summary: (ranks) => [size(largest(ranks, "now")), size(largest(ranks, "peak"))],
  });
}

function clockPanel() {
  const names = ["compute", "communication", "wait"];
  const total = (rank) => names.reduce((sum, name) => sum + known(rank[name]), 0);
  return barPanel({
    title: "Time of a step per rank",
    valueWidth: "4.6em",
    parts: [
      { name: "compute", label: "compute", color: "--wb-green" },
      { name: "communication", label: "communication", color: "--wb-orange" },
      { name: "wait", label: "wait", color: "--wb-gray" },
    ],
    text: (rank) => milliseconds(total(rank) || NaN),
    describe: (rank) => names.map((name) => `${name} ${milliseconds(rank[name])}`).join(", "),
    summary: (ranks) => names.map((name) => milliseconds(average(ranks, name))),
  });
}
