// What the kernel said so far; one for each model, shared by its views.

const COLUMNS = ["step", "loss", "samples_per_s", "accuracy"];
const FIGURES = ["now", "peak", "compute", "communication", "wait", "onGpu"];

export function openFeed(model) {
  const feed = {
    points: Object.fromEntries(COLUMNS.map((name) => [name, []])),
    ranks: [],
    status: model.get("_status"),
    received: performance.now(),
    messages: 0,
    listeners: new Set(),
  };
  replaceFrom(feed.points, 0, doubles(model.get("_points")));
  feed.ranks = figures(doubles(model.get("_ranks")));

  const take = (message, buffers) => {
    if (message.type !== "update") return;
    if (message.start > feed.points.step.length) {
      model.send({ type: "hello" }); // an earlier message was lost: ask for everything
      return;
    }
    replaceFrom(feed.points, message.start, doubles(buffers[0]));
    feed.ranks = figures(doubles(buffers[1]));
    feed.status = message.status;
    feed.received = performance.now();
    feed.messages += 1;
    for (const listener of feed.listeners) listener();
  };
  model.on("msg:custom", take);
  if (!feed.status.ended) model.send({ type: "hello" }); // the run went on since the traits were set
  return { feed, close: () => model.off("msg:custom", take) };
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

function figures(flat) {
  const ranks = [];
  for (let at = 0; at < flat.length; at += FIGURES.length) {
    ranks.push(Object.fromEntries(FIGURES.map((name, i) => [name, flat[at + i]])));
  }
  return ranks;
}

// A buffer may start anywhere within a larger one, where Float64Array cannot.
function doubles(view) {
  return new Float64Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
}

export function latest(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i];
  return NaN;
}
