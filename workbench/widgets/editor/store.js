// What the kernel said so far; one for each model, shared by its views.

// The state is the model's own attribute and changes in place, so that a notebook that is saved
// holds what was last seen.
export function openStore(model) {
  const store = {
    state: model.get("_state"),
    alive: false,
    listeners: new Set(),
    send: (message) => model.send(message),
  };
  const tell = (change) => { for (const listener of store.listeners) listener(change); };

  const take = (message) => {
    store.alive = true;
    if (message.type === "state") {
      const begins = store.state.static?.model !== message.state.static.model
        || store.state.static.facts.name.length !== message.state.static.facts.name.length;
      for (const key of Object.keys(store.state)) delete store.state[key];
      Object.assign(store.state, message.state);
      tell({ begins, columns: true });
      return;
    }
    if (message.type !== "patch") return;
    if (message.version !== store.state.version + 1) {
      // Older than what is known, or one is missing: then ask for everything.
      if (message.version > store.state.version) model.send({ type: "hello" });
      return;
    }
    apply(store.state, message);
    tell({ begins: false, columns: Boolean(message.columns) });
  };
  model.on("msg:custom", take);
  model.send({ type: "hello" }); // the kernel may have gone on since the attribute was set
  return { store, close: () => model.off("msg:custom", take) };
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
