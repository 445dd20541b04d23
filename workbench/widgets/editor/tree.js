// The rows of the table: layers, folds, and conversions between them.

export const HEIGHT = { row: 29, conversion: 21 };

// Nodes with their layers, parents and depth; keys stay the same while the model does.
export function plant(nodes) {
  const grow = (node, depth, key, parent) => {
    const grown = { ...node, depth, key, parent };
    grown.children = (node.children ?? []).map((child, i) => grow(child, depth + 1, `${key}.${i}`, grown));
    grown.layers = node.layer === undefined ? grown.children.flatMap((child) => child.layers) : [node.layer];
    return grown;
  };
  return nodes.map((node, i) => grow(node, 0, String(i), null));
}

export function everyFold(roots) {
  const found = [];
  const visit = (node) => {
    if (node.children.length) found.push(node.key);
    node.children.forEach(visit);
  };
  roots.forEach(visit);
  return found;
}

// What is shown now. With a filter, the layers that fit it, wherever they are folded.
export function listed(roots, open, filter, state) {
  const items = [];
  const fits = matcher(filter, state);
  const visit = (node) => {
    if (fits) {
      if (node.children.length) node.children.forEach(visit);
      else if (fits(node.layer)) push(items, node, state, 0);
      return;
    }
    push(items, node, state, node.depth);
    if (open.has(node.key)) node.children.forEach(visit);
  };
  roots.forEach(visit);
  return items;
}

function push(items, node, state, depth) {
  if (!node.children.length) {
    const steps = state.columns.arrives[node.layer];
    if (steps.length) items.push({ type: "conversion", key: `c${node.key}`, node, depth });
  }
  items.push({ type: "row", key: node.key, node, depth });
}

// Words that all have to occur in a layer's name, kind or scheme.
function matcher(filter, { static: { facts }, columns }) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return null;
  return (layer) => {
    const scheme = facts.schemes[layer].length ? columns.scheme[layer] : "";
    const moved = columns.arrives[layer].length ? "converts" : "";
    const text = `${facts.name[layer]} ${facts.kind[layer]} ${scheme} ${moved}`.toLowerCase();
    return words.every((word) => text.includes(word));
  };
}

// The sum of a column over a node's layers; undefined while nothing is known.
export function total(state, column, layers) {
  const values = state.columns[column];
  if (!values) return undefined;
  let sum = 0;
  for (const layer of layers) sum += values[layer];
  return sum;
}

// The value that all of these layers have in a column, or null where they differ.
export function common(values, layers) {
  const first = values[layers[0]];
  return layers.every((layer) => values[layer] === first) ? first : null;
}
