// What can be done to the run, and how the last of it went.

import { element, setText } from "../element.js";

const SIGNS = { running: "◌", done: "✓", failed: "✕" };

export function controls(feed) {
  const every = []; // [button, which entry of `can` allows it, what it does]
  const button = (name, allowed, text, title, content = () => ({})) => {
    const made = element("button", { type: "button", "data-do": name, disabled: "" }, text); // until it is known
    made.addEventListener("click", () => {
      const given = content();
      if (given === null) return;
      made.disabled = true; // until the kernel says how it stands
      feed.send({ type: "do", name, ...given });
    });
    every.push({ made, name, allowed, title });
    return made;
  };
  const pause = button("pause", "pause", "❚❚ Pause", "leaves a checkpoint, and the engines to others");
  const resume = button("resume", "resume", "▶ Resume", "goes on from the newest checkpoint");
  const save = button("checkpoint", "checkpoint", "Checkpoint now", "written after the current step; the run goes on");
  const stop = button("stop", "stop", "Stop", "ends the run after this step, with a checkpoint");
  stop.classList.add("wb-stop");

  const rate = number("learning rate", "any", "6em");
  const set = button("lr", "lr", "Set", "all ranks go on at this rate after the current step", () => (rate.value ? { value: rate.value } : null));
  let shownRate = null;
  rate.addEventListener("keydown", (event) => { if (event.key === "Enter" && !set.disabled) set.click(); });

  const rank = element("select", { "aria-label": "rank to disturb" });
  const factor = number("times slower", "0.5", "4.5em");
  factor.min = "1";
  factor.value = "2";
  const at = () => ({ rank: Number(rank.value) });
  const faults = [
    button("kill", "fault", "Kill", "ends the rank's engine as a crash would; the job goes on from its newest checkpoint", at),
    button("halt", "fault", "Hold", "stops the rank's engine where it stands; the others wait", at),
    button("release", "fault", "Release", "lets the rank's engine go on at its own speed", at),
    button("slow", "fault", "Slow down", "makes the rank's engine so many times slower", () => ({ ...at(), factor: factor.value })),
  ];
  const disturb = element("details", { class: "wb-faults" },
    element("summary", {}, "Faults on purpose"),
    element("div", { class: "wb-tools" }, element("label", {}, "rank ", rank), ...faults.slice(0, 3), faults[3], element("label", {}, factor, " times")));
  const outcome = element("p", { class: "wb-outcome", role: "status" });
  const bar = element("div", { class: "wb-tools", role: "group", "aria-label": "controls" },
    pause, resume, save,
    element("label", {}, "learning rate ", rate), set,
    disturb, stop);
  let offered = 0;

  const draw = () => {
    const { status } = feed.runs[feed.shown];
    const { last, of = {} } = feed.outcome;
    for (const { made, name, allowed, title } of every) {
      const why = status.can[allowed];
      const isBusy = of[name]?.state === "running" || (name === "stop" && status.stopping);
      made.disabled = why !== "" || isBusy;
      made.title = why || title;
    }
    setText(stop, status.stopping ? "Stopping …" : "Stop");
    rate.disabled = status.can.lr !== "";
    if (status.lr !== shownRate && document.activeElement !== rate) {
      shownRate = status.lr;
      rate.value = status.lr ?? "";
    }
    if (offered !== feed.ranks.length) {
      const before = rank.value;
      offered = feed.ranks.length;
      rank.replaceChildren(...feed.ranks.map((_, i) => element("option", { value: i }, String(i))));
      if (before !== "" && Number(before) < offered) rank.value = before;
    }
    const told = of[last];
    outcome.hidden = !told;
    outcome.className = `wb-outcome wb-${told?.state ?? "none"}`;
    setText(outcome, told ? `${SIGNS[told.state]} ${told.text}${told.advice ? ` ${told.advice}` : ""}` : "");
  };
  return { parts: [bar, outcome], draw };
}

function number(label, step, width) {
  return element("input", { type: "number", "aria-label": label, step, min: "0", style: `width: ${width}` });
}
