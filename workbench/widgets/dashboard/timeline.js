// A step in time: lanes of each rank, as predicted and below as measured, on one scale.

import { element, panel } from "../element.js";
import { milliseconds, size } from "../units.js";
import { SPAN } from "./feed.js";

const KINDS = ["load", "forward", "loss", "backward", "collective", "wait", "update", "step"];
const COLORS = ["--wb-pale", "--wb-blue", "--wb-purple", "--wb-second", "--wb-orange", "--wb-gray", "--wb-green", "--wb-pale"];
const LANES = ["compute", "communication"];
const [LEFT, LANE, GAP, TITLE, AXIS, AT_ONCE] = [72, 11, 5, 18, 18, 8];
const CLOSEST = 2e-6; // of the whole step

export function timelinePanel(feed) {
  const canvas = element("canvas", { tabindex: "0", role: "img" });
  const tip = element("div", { class: "wb-tip", role: "status" });
  const frame = element("div", { class: "wb-timeline" }, canvas, tip);
  const ranks = element("select", { "aria-label": "ranks in the timeline" });
  const button = (text, label, act) => {
    const made = element("button", { type: "button", title: label, "aria-label": label }, text);
    made.addEventListener("click", act);
    return made;
  };
  const tools = element("div", { class: "wb-tools" },
    element("label", {}, ranks),
    button("+", "zoom in", () => zoom(0.5)), button("−", "zoom out", () => zoom(2)),
    button("◀", "earlier", () => pan(-0.25)), button("▶", "later", () => pan(0.25)),
    button("Whole step", "show the whole step", () => look(0, 1)),
    element("span", { class: "wb-note" }, "drag to zoom, arrow keys go from span to span"));
  const missing = element("p", { class: "wb-missing" });
  const { root, setLegend, note } = panel("Step in time",
    KINDS.filter((kind) => kind !== "step").map((kind) => ({ label: kind, color: COLORS[KINDS.indexOf(kind)] })),
    element("div", {}, tools, frame, missing));
  root.classList.add("wb-wide");
  let view = [0, 1]; // shares of the longer of both steps
  let lanes = []; // {name, top, spans: [{at, start, end}], set} from the top
  let whole = 1;
  let chosen = null; // [lane, index] under the mouse, or where the keys are
  let dragged = null;
  let known = [];
  let offered = "";

  const sets = () => [["Predicted", feed.predicted], ["Measured", feed.measured]].filter(([, set]) => set.spans.length);

  const arrange = () => {
    lanes = [];
    let top = AXIS;
    whole = Math.max(...sets().map(([, set]) => set.seconds), 1e-9);
    for (const [title, set] of sets()) {
      const first = set.ranks[0];
      const byLane = new Map();
      for (let at = 0; at < set.spans.length; at += SPAN) {
        const key = `${set.spans[at]} ${set.spans[at + 1]}`;
        if (!byLane.has(key)) byLane.set(key, []);
        byLane.get(key).push({ at, start: set.spans[at + 4], end: set.spans[at + 4] + set.spans[at + 5] });
      }
      const heading = top;
      top += TITLE;
      for (let rank = first; rank < first + set.ranks[1]; rank++) {
        LANES.forEach((name, lane) => {
          const spans = byLane.get(`${rank} ${lane}`) ?? [];
          if (lane === 1 && !spans.length && ![...byLane.keys()].some((key) => key.endsWith(" 1"))) return;
          lanes.push({ title, rank, name, top, spans, set, heading: lane === 0 && rank === first ? heading : null });
          top += LANE + 1;
        });
        top += GAP;
      }
    }
    return top;
  };

  const color = (name) => getComputedStyle(canvas).getPropertyValue(name).trim();
  const width = () => Math.max(canvas.clientWidth - LEFT, 50);
  const x = (seconds) => LEFT + ((seconds / whole - view[0]) / (view[1] - view[0])) * width();
  const time = (left) => (view[0] + ((left - LEFT) / width()) * (view[1] - view[0])) * whole;

  const draw = () => {
    offer();
    const isNew = known[0] !== feed.predicted.spans || known[1] !== feed.measured.spans;
    if (isNew) {
      known = [feed.predicted.spans, feed.measured.spans];
      chosen = null;
      tip.hidden = true;
      say();
      const height = arrange();
      for (const node of [canvas, tools, root.querySelector(".wb-legend")]) node.hidden = lanes.length === 0;
      canvas.style.height = `${height}px`;
      paint();
    }
  };

  const say = () => {
    const { predicted, measured } = feed;
    missing.textContent = [predicted.spans.length ? "" : predicted.reason, measured.spans.length ? "" : measured.reason].filter(Boolean).join(" ");
    missing.hidden = !missing.textContent;
    const parts = [];
    if (predicted.spans.length) parts.push(`predicted ${milliseconds(predicted.seconds)}`);
    if (measured.spans.length) parts.push(`measured ${milliseconds(measured.seconds)} in step ${measured.step.toLocaleString("en-US")}`);
    note.textContent = parts.join(", ");
    canvas.setAttribute("aria-label", `step in time of ranks ${feed.measured.ranks[0]} and on: ${parts.join(", ")}`);
    setLegend(KINDS.filter((kind) => kind !== "step").map(() => ""));
  };

  const offer = () => {
    const count = Math.ceil(feed.ranks.length / AT_ONCE);
    const first = Math.max(feed.predicted.ranks[0], feed.measured.ranks[0]);
    const key = `${feed.ranks.length} ${first}`;
    if (key === offered) return;
    offered = key;
    ranks.parentElement.hidden = count < 2;
    ranks.replaceChildren(...Array.from({ length: count }, (_, i) => {
      const last = Math.min((i + 1) * AT_ONCE, feed.ranks.length) - 1;
      return element("option", { value: i * AT_ONCE }, `ranks ${i * AT_ONCE} to ${last}`);
    }));
    ranks.value = String(first - (first % AT_ONCE));
  };
  ranks.addEventListener("change", () => feed.send({ type: "ranks", first: Number(ranks.value) }));

  const paint = () => {
    if (!lanes.length || canvas.clientWidth < 80) return;
    const ratio = window.devicePixelRatio || 1;
    const [wide, high] = [canvas.clientWidth, canvas.clientHeight];
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(high * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const [ink, faint, rule] = ["--wb-ink", "--wb-faint", "--wb-rule"].map(color);
    const fills = COLORS.map(color);
    pen.font = `11px ${getComputedStyle(canvas).fontFamily}`;
    ruler(pen, high, faint, rule);
    let drawn = 0;
    lanes.forEach((lane, i) => {
      pen.fillStyle = ink;
      if (lane.heading !== null) {
        pen.font = pen.font.replace(/^/, "600 ");
        pen.fillText(lane.title, 2, lane.heading + 13);
        pen.font = pen.font.replace("600 ", "");
      }
      pen.fillStyle = faint;
      if (lane.name === "compute") pen.fillText(`rank ${lane.rank}`, 2, lane.top + 10);
      pen.save();
      pen.beginPath();
      pen.rect(LEFT, 0, wide - LEFT, high);
      pen.clip();
      for (const span of lane.spans) {
        const [from, to] = [x(span.start), x(span.end)];
        if (to < LEFT || from > wide) continue;
        pen.fillStyle = fills[lane.set.spans[span.at + 2]];
        pen.fillRect(from, lane.top, Math.max(to - from - (to - from > 8 ? 0.6 : 0), 0.5), LANE);
        drawn += 1;
      }
      if (chosen?.[0] === i) {
        const span = lane.spans[chosen[1]];
        pen.strokeStyle = ink;
        pen.lineWidth = 2;
        pen.strokeRect(x(span.start) - 1, lane.top - 1, Math.max(x(span.end) - x(span.start), 2) + 2, LANE + 2);
      }
      pen.restore();
    });
    if (dragged) {
      pen.globalAlpha = 0.2;
      pen.fillStyle = ink;
      pen.fillRect(Math.min(...dragged), AXIS, Math.abs(dragged[1] - dragged[0]), high);
      pen.globalAlpha = 1;
    }
    Object.assign(canvas.dataset, { spans: drawn, from: view[0].toFixed(4), to: view[1].toFixed(4) });
  };

  const ruler = (pen, high, faint, rule) => {
    const span = (view[1] - view[0]) * whole;
    const rough = span / Math.max(2, width() / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const pace = [1, 2, 5, 10].map((f) => f * power).find((p) => p >= rough);
    for (let t = Math.ceil((view[0] * whole) / pace) * pace; t <= view[1] * whole * 1.0001; t += pace) {
      const left = Math.round(x(t)) + 0.5;
      pen.strokeStyle = rule;
      pen.beginPath();
      pen.moveTo(left, AXIS - 4);
      pen.lineTo(left, high);
      pen.stroke();
      pen.fillStyle = faint;
      const words = t === 0 ? "0" : milliseconds(Number(t.toPrecision(6)));
      pen.textAlign = left > LEFT + width() - 30 ? "right" : "center";
      pen.fillText(words, left, 11);
      pen.textAlign = "left";
    }
  };

  const look = (from, to) => {
    const length = Math.min(Math.max(to - from, CLOSEST), 1);
    const start = Math.min(Math.max(from, 0), 1 - length);
    view = [start, start + length];
    paint();
  };
  const zoom = (factor, middle = (view[0] + view[1]) / 2) =>
    look(middle - (middle - view[0]) * factor, middle + (view[1] - middle) * factor);
  const pan = (share) => {
    const by = share * (view[1] - view[0]);
    look(view[0] + by, view[1] + by);
  };

  const choose = (lane, index) => {
    chosen = index === undefined || index < 0 ? null : [lane, index];
    tip.hidden = chosen === null;
    if (chosen !== null) {
      const { set, rank, name, title, spans, top } = lanes[lane];
      const { at, start, end } = spans[index];
      const [label, op, phase] = set.labels[set.spans[at + 3]];
      const bytes = set.spans[at + 6];
      tip.textContent = `${title}, rank ${rank}, ${name}: ${KINDS[set.spans[at + 2]]} ${op ? `${op} ` : ""}${label}`
        + `${phase ? ` (${phase})` : ""}, ${milliseconds(end - start)} from ${milliseconds(start)} on${bytes ? `, ${size(bytes)} received` : ""}`;
      const left = Math.min(Math.max(x(start), LEFT), canvas.clientWidth - 40);
      tip.style.left = `${Math.min(left, Math.max(0, canvas.clientWidth - tip.offsetWidth - 4))}px`;
      tip.style.top = `${top + LANE + 6}px`;
    }
    paint();
  };

  const under = (event) => {
    const box = canvas.getBoundingClientRect();
    const [left, top] = [event.clientX - box.left, event.clientY - box.top];
    const lane = lanes.findIndex((each) => top >= each.top && top < each.top + LANE);
    if (lane < 0 || left < LEFT) return [left, -1, -1];
    const near = (1.5 / width()) * (view[1] - view[0]) * whole;
    const t = time(left);
    return [left, lane, lanes[lane].spans.findIndex((span) => span.start - near <= t && t <= span.end + near)];
  };
  canvas.addEventListener("pointermove", (event) => {
    const [left, lane, index] = under(event);
    if (dragged) {
      dragged[1] = Math.max(left, LEFT);
      paint();
    } else if (chosen?.[0] !== lane || chosen?.[1] !== index) choose(lane, index);
  });
  canvas.addEventListener("pointerdown", (event) => {
    const [left] = under(event);
    dragged = [Math.max(left, LEFT), Math.max(left, LEFT)];
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => {
    const [from, to] = dragged ? [Math.min(...dragged), Math.max(...dragged)] : [0, 0];
    dragged = null;
    if (to - from > 5) look(time(from) / whole, time(to) / whole);
    else paint();
  });
  canvas.addEventListener("pointerleave", () => choose(0, -1));
  canvas.addEventListener("dblclick", () => look(0, 1));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // a page that scrolls goes on scrolling
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, time(under(event)[0]) / whole);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const act = {
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => look(0, 1),
      ArrowLeft: () => (event.shiftKey ? pan(-0.25) : go(0, -1)),
      ArrowRight: () => (event.shiftKey ? pan(0.25) : go(0, 1)),
      ArrowUp: () => go(-1, 0), ArrowDown: () => go(1, 0),
      Escape: () => choose(0, -1),
    }[event.key];
    if (!act || !lanes.length) return;
    event.preventDefault();
    act();
  });

  // To the next span of the lane, or to the one of the next lane that begins last before it.
  const go = (down, along) => {
    if (chosen === null) {
      const first = lanes.findIndex((lane) => lane.spans.length);
      choose(first, 0);
      return;
    }
    const [lane, index] = chosen;
    if (along) {
      const next = Math.min(Math.max(index + along, 0), lanes[lane].spans.length - 1);
      const span = lanes[lane].spans[next];
      if (span.start / whole < view[0] || span.start / whole > view[1]) {
        const half = (view[1] - view[0]) / 2;
        look(span.start / whole - half, span.start / whole + half);
      }
      choose(lane, next);
      return;
    }
    const from = lanes[lane].spans[index].start;
    for (let to = lane + down; to >= 0 && to < lanes.length; to += down) {
      const { spans } = lanes[to];
      if (!spans.length) continue;
      const after = spans.findIndex((span) => span.end > from);
      choose(to, after < 0 ? spans.length - 1 : after);
      return;
    }
  };

  const resized = new ResizeObserver(() => paint());
  resized.observe(frame);
  return { root, draw, repaint: paint, close: () => resized.disconnect() };
}
