// One job: who it is, how far, where, when, and what may be asked of it.

import { element, setText } from "../element.js";
import { clock, SYMBOLS } from "./rows.js";

const PAUSE = ["pause", "Pause", "leaves a checkpoint, and its engines"];
const RESUME = ["resume", "Resume", "goes on from its checkpoint when engines are free"];
const STOP = ["stop", "Stop", "ends after its current step, with a checkpoint"];
const CANCEL = ["cancel", "Cancel", "ends at once, without a checkpoint"];
const UP = ["up", "▲", "goes before jobs of a lower priority", "higher priority for"];
const DOWN = ["down", "▼", "goes behind jobs of a higher priority", "lower priority for"];
const CERTAIN_MS = 3000;

export function jobRow(live) {
  const id = element("b", {});
  const name = element("span", { class: "wb-name" });
  const tag = element("span", { class: "wb-faint wb-tag" });
  const state = element("span", { class: "wb-state" });
  const progress = element("progress", {});
  const steps = element("span", { class: "wb-steps" });
  const engines = element("td", { role: "cell" });
  const priority = element("span", { class: "wb-priority" });
  const when = element("td", { class: "wb-when", role: "cell" });
  const reason = element("div", { class: "wb-why" });
  const told = element("div", { class: "wb-told", role: "status" });
  let job;

  // `choose` says what a button does now: pause and resume are one, which keeps the focus.
  const button = (choose) => {
    const made = element("button", { type: "button" });
    let timer;
    const settle = () => {
      clearTimeout(timer);
      delete made.dataset.sure;
      draw();
    };
    made.addEventListener("click", () => {
      const { action } = made.dataset;
      if (job.can[action]) return;
      // What would lose work is asked for twice.
      if (action === "cancel" && job.step > 0 && !made.dataset.sure) {
        made.dataset.sure = "asked";
        timer = setTimeout(settle, CERTAIN_MS);
        draw();
        return;
      }
      settle();
      live.ask({ type: "job", job: job.id, action });
    });
    const draw = () => {
      const [action, text, title, spoken = text] = choose();
      const why = job.can[action];
      made.dataset.action = action;
      setText(made, made.dataset.sure ? "Sure?" : text);
      // A button that cannot be pressed keeps the focus that it has, and says why.
      made.setAttribute("aria-disabled", String(Boolean(why)));
      made.setAttribute("aria-label", `${made.dataset.sure ? "Sure? " : ""}${spoken} job ${job.id}`);
      made.title = why ? `not now: ${why}` : title;
    };
    return { made, draw };
  };
  const up = button(() => UP);
  const down = button(() => DOWN);
  const others = [button(() => (job.can.resume ? PAUSE : RESUME)), button(() => STOP), button(() => CANCEL)];

  const root = element("tr", { role: "row" },
    element("th", { scope: "row", role: "rowheader" }, element("div", { class: "wb-who" }, id, name, tag), reason, told),
    element("td", { role: "cell" }, state),
    element("td", { role: "cell" }, element("div", { class: "wb-progress" }, progress, steps)),
    engines,
    element("td", { role: "cell" }, element("div", { class: "wb-level" }, down.made, priority, up.made)),
    when,
    element("td", { role: "cell" }, element("div", { class: "wb-asks" }, ...others.map(({ made }) => made))));

  const draw = (now) => {
    job = now;
    root.dataset.job = now.id;
    root.dataset.state = now.state;
    setText(id, String(now.id));
    setText(name, now.name);
    name.title = now.name;
    setText(tag, now.tag);
    setText(state, `${SYMBOLS[now.state] ?? "•"} ${now.state}`);
    progress.max = Math.max(now.steps, 1);
    progress.value = now.step;
    progress.setAttribute("aria-label", `steps of job ${now.id} done`);
    setText(steps, `${now.step.toLocaleString("en-US")} of ${now.steps.toLocaleString("en-US")}`);
    setText(engines, now.engines);
    engines.title = "engines";
    setText(priority, String(now.priority));
    setText(when, now.when ? `${now.when === "ended" ? "ended" : `${now.when} about`} ${clock(now.at)}` : "");
    setText(reason, now.reason.split("\n")[0]);
    reason.title = now.reason;
    reason.hidden = !now.reason;
    setText(told, now.told);
    told.hidden = !now.told;
    [up, down, ...others].forEach((one) => one.draw());
  };
  return { root, draw };
}
