// Numbers, sizes and times, in the forms of the command line (format_size, format_duration).

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const count = (n) => whole.format(n ?? 0);

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

export function short(n) {
  n ??= 0;
  if (n < 10_000) return count(n);
  if (n < 1_000_000) return `${(n / 1000).toFixed(n < 100_000 ? 1 : 0)}k`;
  return `${(n / 1e6).toFixed(1)}M`;
}

export function bytes(n) {
  for (const [unit, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["KB", 1e3]]) {
    if (n >= scale) return `${(n / scale).toFixed(1).replace(/\.0$/, "")} ${unit}`;
  }
  return `${n} bytes`;
}

/** A duration that is estimated, as whole seconds or minutes. */
export function about(s) {
  return s < 120 ? `${Math.max(1, Math.round(s))} s` : `${Math.round(s / 60)} min`;
}

export function seconds(s) {
  if (s === null || s === undefined) return "";
  if (s < 0.005) return s ? "<0.01 s" : "0 s";
  if (s < 60) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  const whole = Math.round(s);
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min ${whole % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function ago(at, now = Date.now() / 1000) {
  const s = Math.max(0, now - at);
  if (s < 5) return "now";
  if (s < 60) return `${Math.floor(s)} s ago`;
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  if (s < 86_400) return `${Math.floor(s / 3600)} h ago`;
  return plural(Math.floor(s / 86_400), "day") + " ago";
}

export const clock = (at) =>
  new Date(at * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });

export const percent = (part, all) => {
  if (!all) return "0%";
  const share = (100 * part) / all;
  return share > 99 && share < 100 ? "over 99%" : `${Math.round(share)}%`;
};

export function median(values) {
  const sorted = values.filter((v) => Number.isFinite(v)).sort((a, b) => a - b);
  if (!sorted.length) return null;
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
