// What is chosen for the whole plan, and what of the table is shown.

import { element, setText } from "../element.js";
import { choice, field } from "./cells.js";

export function toolbar(store, table) {
  const button = (text, title, onClick) => {
    const made = element("button", { type: "button", title }, text);
    made.addEventListener("click", onClick);
    return made;
  };
  const undo = button("↶ Undo", "", () => store.send({ type: "undo" }));
  const redo = button("↷ Redo", "", () => store.send({ type: "redo" }));

  const presets = element("select", { "aria-label": "preset" });
  let offered = "";
  presets.addEventListener("change", () => {
    const [name, group] = JSON.parse(presets.value);
    presets.value = "";
    store.send({ type: "preset", name, group });
  });
  const offer = (world, groups, rules) => {
    const key = JSON.stringify([world, rules]);
    if (offered === key) return;
    offered = key;
    const option = (value, text) => element("option", { value: value && JSON.stringify(value) }, text);
    const sizes = groups.filter((size) => size > 1).reverse();
    presets.replaceChildren(
      option("", "Start from …"),
      ...rules.map(({ name, description, grouped }) => {
        const made = grouped ? element("optgroup", { label: name },
          ...sizes.map((size) => option([name, size], size === world ? `${name}, all ${size} ranks` : `${name}, groups of ${size}`)))
          : option([name, null], name);
        made.title = description;
        return made;
      }));
  };

  const plan = (what, convert = String) => (value) => store.send({ type: "plan", field: what, value: convert(value) });
  const whole = { inputmode: "numeric", size: 4 };
  const world = field("ranks", "", plan("world_size"), whole);
  const batch = field("batch size", "", (value) => store.send({ type: "batch_size", value: Number(value) }), whole);
  const rows = field("rows per rank", "equal", plan("rows"), { size: 8, title: "relative rows of a batch for each rank, such as 3 1 1 1" });
  const tokens = field("tokens per rank", "own rows", plan("tokens"), { size: 8, title: "between cut layers: the tokens of all the group's rows are divided, equal, or by relative numbers such as 3 1 (sequence parallelism)" });
  const rounds = choice("rounds", plan("rounds"));
  const norm = choice("batch norm", plan("batch_norm"));
  const rank = choice("rank whose figures are shown", (value) => store.send({ type: "rank", rank: value === "fullest" ? null : Number(value) }));

  const labelled = (text, control, name) => element("label", { "data-field": name }, element("span", {}, text), control.node);
  const fields = {
    world_size: labelled("ranks", world, "world_size"),
    batch_size: labelled("batch", batch, "batch_size"),
    rounds: labelled("rounds", rounds, "rounds"),
    batch_norm: labelled("batch norm", norm, "batch_norm"),
    rows: labelled("rows", rows, "rows"),
    tokens: labelled("tokens", tokens, "tokens"),
  };

  const filter = element("input", { type: "search", placeholder: "Filter: name, kind, scheme, “converts”", "aria-label": "filter layers", spellcheck: "false" });
  const count = element("span", { class: "wb-faint", role: "status" });
  filter.addEventListener("input", () => {
    const found = table.setFilter(filter.value);
    setText(count, filter.value.trim() ? `${found} ${found === 1 ? "layer fits" : "layers fit"}` : "");
  });
  const unfold = button("Unfold all", "", () => table.foldAll(false));
  const fold = button("Fold", "", () => table.foldAll(true));

  const setting = element("div", { class: "wb-tools", role: "toolbar", "aria-label": "plan" },
    undo, redo, presets, ...Object.values(fields));
  const looking = element("div", { class: "wb-tools", role: "toolbar", "aria-label": "table" },
    filter, count, element("span", { class: "wb-gap" }), unfold, fold, labelled("figures of", rank, "rank"));

  let shown = "fullest";
  rank.node.addEventListener("change", () => { shown = rank.node.value; });

  const draw = () => {
    const { values, static: { rounds: every, norms, rules, tokens: divisible } } = store.state;
    offer(values.world_size, values.groups, rules);
    undo.disabled = values.undo === null;
    undo.title = values.undo === null ? "nothing to undo" : `take back: ${values.undo}`;
    redo.disabled = values.redo === null;
    redo.title = values.redo === null ? "nothing to redo" : `again: ${values.redo}`;
    const refused = (name) => Boolean(values.errors[name]);
    world.update(String(values.world_size), refused("world_size"));
    batch.update(String(values.batch_size), refused("batch_size"));
    batch.node.title = `samples of a step over all ranks; ${values.setting}`;
    rows.update(values.rows, refused("rows"));
    tokens.update(values.tokens, refused("tokens"));
    fields.tokens.hidden = !divisible;
    rounds.update(every, values.rounds);
    norm.update(norms, values.batch_norm);
    const ranks = (values.predicted?.ranks ?? []).map((one) => String(one.rank));
    rank.update(["fullest", ...ranks], ranks.includes(shown) ? shown : "fullest");
    unfold.hidden = fold.hidden = !table.hasFolds();
    for (const [name, label] of Object.entries(fields)) {
      const reason = values.errors[name];
      label.classList.toggle("wb-refused", Boolean(reason));
      label.lastChild.title = reason ?? label.lastChild.title;
      if (reason) label.lastChild.setAttribute("aria-invalid", "true");
      else label.lastChild.removeAttribute("aria-invalid");
    }
  };
  return { setting, looking, draw };
}
