// What the kernel last said of a widget; one for each model, shared by its views.

const PATIENCE_MS = 8000;

// The state is the model's own attribute and changes in place, so that a notebook that is saved
// holds what was last seen. Of what a slider asks for while the kernel is at work, only the last
// is sent, when it has answered.
function openLive(model) {
  let timer;
  let busy = false;
  const waiting = new Map();
  const live = {
    view: model.get("_view"),
    quiet: false, // whether the kernel owes an answer for long
    listeners: new Set(),
    ask: (message, key = "") => {
      if (busy && key) {
        waiting.set(key, message);
        return;
      }
      busy = true;
      model.send(message);
      timer ??= setTimeout(() => {
        live.quiet = true;
        tell();
      }, PATIENCE_MS);
    },
  };
  const tell = () => { for (const listener of live.listeners) listener(); };

  const take = (message) => {
    clearTimeout(timer);
    timer = undefined;
    const spoke = live.quiet;
    live.quiet = false;
    if (message.type === "view") {
      for (const key of Object.keys(live.view)) delete live.view[key];
      Object.assign(live.view, message.view);
    } else if (message.type === "heard") {
      busy = false;
      for (const [key, next] of waiting) {
        waiting.delete(key);
        live.ask(next, key);
        break;
      }
    }
    if (spoke || message.type === "view") tell();
  };
  model.on("msg:custom", take);
  live.ask({ type: "hello" }); // the kernel may have gone on since the attribute was set
  const close = () => {
    clearTimeout(timer);
    model.off("msg:custom", take);
  };
  return { live, close };
}

// What anywidget asks for: views of one kernel's word. `render(live, el)` draws into `el` whenever
// a listener of `live` is called, and gives what ends that.
export function liveWidget(render) {
  return () => {
    let live;
    const initialize = ({ model }) => {
      const opened = openLive(model);
      live = opened.live;
      return opened.close;
    };
    return { initialize, render: ({ el }) => render(live, el) };
  };
}

// A line that says that the kernel is gone, while it is; `root.dataset` counts what was drawn.
export const QUIET = "The kernel has not answered for 8 seconds: it may be at work, or gone. "
  + "This is the last picture; run the cell again when the kernel is back.";
