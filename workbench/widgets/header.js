// The line above the charts: state, progress, time, accuracy, Stop; and what went wrong.

import { element } from "./element.js";
import { duration, percent } from "./units.js";

const SYMBOLS = { starting: "◌", running: "▶", finished: "✓", stopped: "■", failed: "✕" };

export function header(feed, { onStop }) {
  const state = element("span", { class: "wb-state", role: "status" });
  const progress = element("progress", { "aria-label": "steps done" });
  const count = element("span", {});
  const facts = element("span", { class: "wb-facts" });
  const stop = element("button", { class: "wb-stop", type: "button" });
  const cause = element("pre", {});
  const advice = element("p", {});
  const alert = element("div", { class: "wb-alert", role: "alert" }, cause, advice);
  const notes = element("p", { class: "wb-notes" });
  const bar = element("header", { class: "wb-header" }, state, progress, count, facts, stop);
  stop.addEventListener("click", () => {
    stop.disabled = true;
    onStop();
  });

  const set = (node, text) => {
    if (node.textContent !== text) node.textContent = text; // else a screen reader says it again
  };

  const draw = () => {
    const now = feed.status;
    bar.dataset.state = now.state;
    set(state, `${SYMBOLS[now.state] ?? "•"} ${now.stopping ? "stopping" : now.state}`);
    progress.max = Math.max(now.steps, 1);
    progress.value = now.done;
    set(count, `${now.done.toLocaleString("en-US")} of ${now.steps.toLocaleString("en-US")} steps`);
    set(stop, now.stopping ? "Stopping …" : "Stop");
    stop.disabled = now.ended || now.stopping;
    stop.title = now.ended ? `the run has ${now.state === "failed" ? "failed" : "ended"}` : "ends the run after this step";
    alert.hidden = !now.error;
    set(cause, now.error);
    set(advice, now.advice);
    notes.hidden = now.notes.length === 0;
    set(notes, now.notes.join("\n"));
    tick();
  };

  // Between messages time goes on.
  const tick = () => {
    const { ended, state: word, elapsed_s, left_s, accuracy } = feed.status;
    const since = ended || word === "starting" ? 0 : (performance.now() - feed.received) / 1000;
    const parts = [`${duration(elapsed_s + since)} elapsed`];
    if (left_s !== null) parts.push(`${duration(Math.max(0, left_s - since))} left`);
    if (accuracy !== null) parts.push(`test accuracy ${percent(accuracy)}`);
    set(facts, word === "starting" ? "engines load the model …" : parts.join("  ·  "));
  };
  return { parts: [bar, alert, notes], draw, tick };
}
