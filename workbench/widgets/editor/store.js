// What the kernel said so far; one for each model, shared by its views.

const PATIENCE_MS = 8000;

// The state is the model's own attribute and changes in place, so that a notebook that is saved
// holds what was last seen.
export function openStore(model) {
  let timer;
  const store = {
    state: model.get("_state"),
    quiet: false, // whether the kernel owes an answer for long
    listeners: new Set(),
    changed: new Map(), // by layer: the version in which a column of it changed last
    begun: 0, // which beginning of everything this is, counted
    send: (message) => {
      model.send(message);
      timer ??= setTimeout(() => {
        store.quiet = true;
        tell({ begins: false });
      }, PATIENCE_MS);
    },
  };
  const tell = (change) => { for (const listener of store.listeners) listener(change); };

  const take = (message) => {
    clearTimeout(timer);
    timer = undefined;
    if (store.quiet) {
      store.quiet = false;
      tell({ begins: false });
    }
    if (message.type === "state") {
      const begins = store.state.static?.model !== message.state.static.model
        || store.state.static.facts.name.length !== message.state.static.facts.name.length;
      for (const key of Object.keys(store.state)) delete store.state[key];
      Object.assign(store.state, message.state);
      store.begun += 1;
      tell({ begins });
      return;
    }
    if (message.type !== "patch") return;
    if (message.version !== store.state.version + 1) {
      // Older than what is known, or one is missing: then ask for everything.
      if (message.version > store.state.version) store.send({ type: "hello" });
      return;
    }
    apply(store.state, message);
    for (const [at] of Object.values(message.columns ?? {})) {
      for (const layer of at) store.changed.set(layer, message.version);
    }
    tell({ begins: false });
  };
  model.on("msg:custom", take);
  store.send({ type: "hello" }); // the kernel may have gone on since the attribute was set
  const close = () => {
    clearTimeout(timer);
    model.off("msg:custom", take);
  };
  return { store, close };
}

// `state.py` does the same.
function apply(state, patch) {
  for (const [name, [at, values]] of Object.entries(patch.columns ?? {})) {
    const column = (state.columns[name] ??= []);
    at.forEach((index, i) => { column[index] = values[i]; });
  }
  Object.assign(state.values, patch.values ?? {});
  state.version = patch.version;
}
