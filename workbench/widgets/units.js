// Numbers as people read them; `units.py` says the same in pictures without a browser.

export function digits(value) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const magnitude = Math.floor(Math.log10(Math.abs(value)));
  if (magnitude <= -4 || magnitude >= 7) return value.toExponential(2);
  const places = Math.max(0, 2 - magnitude);
  return formatted(value, places);
}

// Kept, because making one takes some thirty times as long as using it.
const formats = new Map();

function formatted(value, places) {
  if (!formats.has(places)) {
    const exactly = { minimumFractionDigits: places, maximumFractionDigits: places };
    formats.set(places, new Intl.NumberFormat("en-US", exactly));
  }
  return formats.get(places).format(value);
}

export function size(count) {
  if (!Number.isFinite(count)) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (count < 999.5) return `${digits(count)} ${unit}`;
    count /= 1024;
  }
  return `${digits(count)} TiB`;
}

export function milliseconds(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  return seconds >= 0.9995 ? `${digits(seconds)} s` : `${digits(1000 * seconds)} ms`;
}

export function duration(seconds) {
  const whole = Math.round(seconds);
  const two = (value) => String(value).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

export function percent(share) {
  return Number.isFinite(share) ? `${(100 * share).toFixed(1)} %` : "–";
}
