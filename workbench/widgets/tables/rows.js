// Rows that stay the same elements while what they say changes, so that they keep the focus.

export function rows(body, key, make) {
  const made = new Map();
  return (all) => {
    const names = new Set(all.map(key));
    for (const [name, row] of made) {
      if (!names.has(name)) {
        row.root.remove();
        made.delete(name);
      }
    }
    all.forEach((one, index) => {
      const name = key(one);
      if (!made.has(name)) made.set(name, make(one));
      const row = made.get(name);
      const there = body.children[index];
      if (there !== row.root) body.insertBefore(row.root, there ?? null);
      row.draw(one);
    });
  };
}

export const SYMBOLS = {
  queued: "◷", starting: "◌", running: "▶", stopping: "◧", paused: "‖",
  finished: "✓", stopped: "■", failed: "✕", cancelled: "⊘", parked: "⚠",
  idle: "○", busy: "▶", dead: "✕",
};

// Seconds since the epoch, as this browser's clock has them; with the day where it is another one.
export function clock(at) {
  if (at === null) return "";
  const then = new Date(1000 * at);
  const time = then.toLocaleTimeString("en-GB");
  return then.toDateString() === new Date().toDateString() ? time
    : `${then.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time}`;
}
