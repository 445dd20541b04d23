// The front of time against memory: plans that no other one beats in both, to click on.

import { element } from "../element.js";
import { milliseconds, size } from "../units.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [420, 190, 70, 16, 12, 34];

function drawn(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function front({ onTake }) {
  const picture = element("div", { class: "wb-front" });
  const list = element("ol", { class: "wb-offers" });
  const root = element("div", {}, picture, list);
  let known = null;

  const draw = (task, now) => {
    const points = task?.state === "done" ? (task.points ?? []) : [];
    const key = JSON.stringify([points, now]);
    if (key === known) return;
    known = key;
    root.hidden = !points.length;
    picture.hidden = points.some((point) => point.step_s === null);
    list.replaceChildren(...points.map((point, index) => {
      const time = point.step_s === null ? "does not fit" : milliseconds(point.step_s);
      const button = element("button", { type: "button", "data-offer": index },
        element("b", {}, `${time}, ${size(point.peak)}`), element("span", {}, point.plan));
      button.addEventListener("click", () => onTake(index));
      return element("li", {}, button);
    }));
    picture.replaceChildren(...(points.length && !picture.hidden ? [chart(points, now, task.limit)] : []));
  };

  const chart = (points, now, limit) => {
    const here = now && now.step_s !== null ? [{ step_s: now.step_s, peak: now.peak_bytes }] : [];
    const every = [...points, ...here];
    const x = scale(every.map((point) => point.step_s), LEFT, WIDTH - RIGHT);
    const y = scale(every.map((point) => point.peak), HEIGHT - BOTTOM, TOP);
    const text = (left, top, words, anchor = "middle") => drawn("text", { x: left, y: top, "text-anchor": anchor }, words);
    const ends = (of, values) => [Math.min(...values), Math.max(...values)].filter((v, i, all) => i === 0 || v > all[0] * 1.02).map((v) => [of(v), v]);
    const svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "group", "aria-label": "step time against memory of suggested plans" },
      drawn("path", { class: "wb-axis", d: `M${LEFT} ${TOP}V${HEIGHT - BOTTOM}H${WIDTH - RIGHT}` }),
      text((LEFT + WIDTH) / 2, HEIGHT - 4, "step time"),
      ...ends(x, every.map((p) => p.step_s)).map(([left, v]) => text(left, HEIGHT - BOTTOM + 15, milliseconds(v))),
      ...ends(y, every.map((p) => p.peak)).map(([top, v]) => text(LEFT - 6, top + 4, size(v), "end")));
    if (points.length > 1) {
      svg.append(drawn("path", { class: "wb-frontier", d: points.map((p, i) => `${i ? "L" : "M"}${x(p.step_s)} ${y(p.peak)}`).join("") }));
    }
    here.forEach((p) => svg.append(drawn("path", { class: "wb-here", d: `M${x(p.step_s) - 6} ${y(p.peak)}h12m-6 -6v12` }, drawn("title", {}, "the plan as it is"))));
    points.forEach((p, index) => {
      const words = `${milliseconds(p.step_s)}, ${size(p.peak)}: ${p.plan}`;
      const dot = drawn("circle", { cx: x(p.step_s), cy: y(p.peak), r: 6, tabindex: 0, role: "button", "aria-label": `take ${words}`, "data-point": index }, drawn("title", {}, words));
      dot.addEventListener("click", () => onTake(index));
      dot.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        event.stopPropagation();
        onTake(index);
      });
      svg.append(dot);
    });
    return svg;
  };
  return { root, draw };
}

function scale(values, from, to) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const margin = (high - low || Math.abs(high) || 1) * 0.08;
  return (value) => from + ((value - low + margin) / (high - low + 2 * margin)) * (to - from);
}
