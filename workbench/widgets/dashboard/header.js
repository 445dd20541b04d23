// The line above the charts: which run, its state, progress, time, accuracy; and what went wrong.

import { element, setText } from "../element.js";
import { digits, duration, percent } from "../units.js";

const SYMBOLS = { queued: "…", starting: "◌", running: "▶", paused: "❚❚", finished: "✓", stopped: "■", failed: "✕" };

export function header(feed) {
  const chosen = element("select", { "aria-label": "run shown in detail" });
  const state = element("span", { class: "wb-state", role: "status" });
  const progress = element("progress", { "aria-label": "steps done" });
  const count = element("span", {});
  const facts = element("span", { class: "wb-facts" });
  const cause = element("pre", {});
  const advice = element("p", {});
  const alert = element("div", { class: "wb-alert", role: "alert" }, cause, advice);
  const quiet = element("div", { class: "wb-alert wb-quiet", role: "alert" });
  const reason = element("p", { class: "wb-reason" });
  const bar = element("header", { class: "wb-header" }, chosen, state, progress, count, facts);
  chosen.addEventListener("change", () => feed.send({ type: "show", name: chosen.value }));
  let offered = "";

  const draw = () => {
    const { name, status: now } = feed.runs[feed.shown];
    offer(now);
    bar.dataset.state = now.state;
    setText(state, `${SYMBOLS[now.state] ?? "•"} ${now.stopping ? "stopping" : now.state}`);
    progress.max = Math.max(now.steps, 1);
    progress.value = now.done;
    setText(count, `${now.done.toLocaleString("en-US")} of ${now.steps.toLocaleString("en-US")} steps`);
    alert.hidden = !now.error;
    setText(cause, feed.runs.length > 1 && now.error ? `${name}: ${now.error}` : now.error);
    setText(advice, now.advice);
    reason.hidden = !now.reason;
    setText(reason, now.reason);
    quiet.hidden = feed.quietSince === null;
    setText(quiet, feed.quietSince === null ? "" : silence(feed.quietSince));
    tick();
  };

  const offer = () => {
    const names = feed.runs.map(({ name }) => name);
    chosen.hidden = names.length === 1;
    const key = names.join("\n");
    if (key !== offered) {
      offered = key;
      chosen.replaceChildren(...names.map((each) => element("option", { value: each }, each)));
    }
    if (document.activeElement !== chosen || chosen.value !== names[feed.shown]) chosen.value = names[feed.shown];
  };

  // Between messages time goes on.
  const tick = () => {
    if (!feed.runs.length) return;
    const { ended, state: word, elapsed_s, left_s, metric, accuracy, lr } = feed.runs[feed.shown].status;
    const goesOn = !ended && word === "running" && feed.quietSince === null;
    const since = goesOn ? (performance.now() - feed.received) / 1000 : 0;
    const parts = [`${duration(elapsed_s + since)} elapsed`];
    if (left_s !== null) parts.push(`${duration(Math.max(0, left_s - since))} left`);
    if (accuracy !== null) parts.push(`test ${metric} ${(metric === "accuracy" ? percent : digits)(accuracy)}`);
    if (lr !== null) parts.push(`learning rate ${lr}`);
    setText(facts, word === "starting" ? "engines load the model …" : parts.join("  ·  "));
  };
  return { parts: [bar, quiet, alert, reason], draw, tick };
}

function silence(since) {
  return `The kernel has not answered since ${since.toLocaleTimeString()}: it is busy, or gone. The picture is the last `
    + "one; runs go on without a kernel. After a restart: cluster = wb.Cluster.attach(name), wb.Dashboard(cluster.jobs[id]).";
}
