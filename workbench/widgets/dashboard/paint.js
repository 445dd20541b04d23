// At most one drawing for each frame, and none while nobody can see it.

export function paintWhenSeen(root, draw) {
  let frame = 0;
  let seen = false;
  let stale = true;
  const request = () => {
    stale = true;
    if (seen && !frame && document.visibilityState !== "hidden") {
      frame = requestAnimationFrame(() => {
        frame = 0;
        stale = false;
        draw();
      });
    }
  };
  const again = () => { if (stale) request(); };
  const watcher = new IntersectionObserver((entries) => {
    seen = entries.at(-1).isIntersecting;
    if (seen) again();
  });
  watcher.observe(root);
  document.addEventListener("visibilitychange", again);
  const close = () => {
    watcher.disconnect();
    document.removeEventListener("visibilitychange", again);
    cancelAnimationFrame(frame);
  };
  return { request, close };
}
