// What the kernel said so far; one for each model, shared by its views.

const COLUMNS = ["step", "loss", "samples_per_s", "accuracy"];
const FIGURES = [
  "now", "peak", "weights", "gradients", "optimizer", "activations", "buffers",
  "compute", "communication", "wait", "received", "receivedPerS", "onGpu",
];
export const CATEGORIES = ["weights", "gradients", "optimizer", "activations", "buffers"];
const PREDICTED = [...CATEGORIES, "received"];
export const SPAN = 7; // numbers of a span: rank, lane, kind, label, start, seconds, bytes
const PATIENCE_MS = 8000;
const ASK_EVERY_MS = 10000;

export function openFeed(model) {
  let timer;
  let heardAt = performance.now();
  const feed = {
    runs: [],
    shown: 0,
    ranks: [],
    limits: [],
    conditions: [],
    forecast: { reason: "" },
    expected: [],
    predicted: { spans: [], labels: [], ranks: [0, 0], reason: "" },
    measured: { spans: [], labels: [], ranks: [0, 0], reason: "" },
    events: [],
    outcome: {},
    received: performance.now(),
    quietSince: null, // when the kernel was heard last, if it owes an answer for long
    messages: 0,
    listeners: new Set(),
    send: (message) => {
      model.send(message);
      timer ??= setTimeout(() => {
        feed.quietSince = new Date(Date.now() - (performance.now() - heardAt));
        tell();
      }, PATIENCE_MS);
    },
  };
  const tell = () => { for (const listener of feed.listeners) listener(); };
  const hasEnded = () => feed.runs.every((run) => run.status.ended);

  const take = (message, buffers) => {
    clearTimeout(timer);
    timer = undefined;
    heardAt = performance.now();
    const wasQuiet = feed.quietSince !== null;
    feed.quietSince = null;
    if (message.type !== "update") {
      if (wasQuiet) tell();
      return;
    }
    const isLate = message.runs?.some(({ index, start }) => start > (feed.runs[index]?.points.step.length ?? 0));
    if (isLate) {
      feed.send({ type: "hello" }); // an earlier message was lost: ask for everything
      return;
    }
    apply(feed, message, buffers[0]);
    feed.received = performance.now();
    feed.messages += 1;
    tell();
  };
  apply(feed, model.get("_content"), model.get("_numbers"));
  model.on("msg:custom", take);
  if (!hasEnded()) feed.send({ type: "hello" }); // the runs went on since the traits were set
  const asking = setInterval(() => {
    const silence = performance.now() - heardAt;
    if (!hasEnded() && silence > ASK_EVERY_MS) feed.send({ type: "ping" });
  }, ASK_EVERY_MS / 2);
  const close = () => {
    clearTimeout(timer);
    clearInterval(asking);
    model.off("msg:custom", take);
  };
  return { feed, close };
}

function apply(feed, message, buffer) {
  const parts = unpacked(message.parts, buffer);
  for (const { index, start, name, status } of message.runs ?? []) {
    const run = (feed.runs[index] ??= { points: Object.fromEntries(COLUMNS.map((c) => [c, []])) });
    Object.assign(run, { name, status });
    replaceFrom(run.points, start, parts.get(`points ${index}`));
  }
  if (message.names) {
    feed.runs.length = message.names.length;
    feed.shown = message.shown;
    feed.ranks = records(parts.get("ranks"), FIGURES);
  }
  if (message.conditions) {
    feed.conditions = message.conditions;
    feed.limits = parts.get("limits");
  }
  if (message.forecast) {
    feed.forecast = message.forecast;
    feed.expected = records(parts.get("forecast"), PREDICTED);
  }
  for (const name of ["predicted", "measured"]) {
    if (message[name]) feed[name] = { ...message[name], spans: parts.get(name) };
  }
  if (message.events) feed.events = message.events;
  if (message.outcome) feed.outcome = message.outcome;
}

// A buffer may start anywhere within a larger one, where Float64Array cannot.
function unpacked(parts, view) {
  const found = new Map();
  let at = view.byteOffset;
  for (const [name, length] of parts) {
    found.set(name, new Float64Array(view.buffer.slice(at, at + length)));
    at += length;
  }
  return found;
}

function replaceFrom(points, start, flat) {
  COLUMNS.forEach((name, column) => {
    const values = points[name];
    values.length = start;
    for (let at = column; at < flat.length; at += COLUMNS.length) {
      values.push(Number.isNaN(flat[at]) ? null : flat[at]); // null is uPlot's gap
    }
  });
}

function records(flat, names) {
  const found = [];
  for (let at = 0; at < flat.length; at += names.length) {
    found.push(Object.fromEntries(names.map((name, i) => [name, flat[at + i]])));
  }
  return found;
}

export function latest(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i];
  return NaN;
}
