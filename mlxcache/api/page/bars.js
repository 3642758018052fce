// Stacked bars.

import { h, setAttr } from "./dom.js";
import { count, plural } from "./format.js";

const KINDS = ["ram", "disk", "fed"];
const WORDS = { ram: "from RAM", disk: "from disk", fed: "computed" };

// One bar of a prompt's tokens. `update(parts, share, whole)`: `share` of the place is its length, for
// `whole` tokens; what a cancelled request left uncomputed stays empty.
export function promptBar() {
  const segments = Object.fromEntries(KINDS.map((kind) => [kind, h("i", { class: kind })]));
  const element = h("div", { class: "bar", role: "img" }, ...Object.values(segments));
  const update = (parts, share = 1, whole = 0) => {
    const done = KINDS.reduce((sum, kind) => sum + parts[kind], 0);
    const total = Math.max(whole, done);
    element.style.setProperty("--share", `${100 * share}%`);
    for (const kind of KINDS) {
      segments[kind].style.setProperty("flex-grow", total ? parts[kind] / total : 0);
      segments[kind].hidden = !parts[kind];
    }
    const words = KINDS.filter((kind) => parts[kind]).map((kind) => `${count(parts[kind])} ${WORDS[kind]}`);
    if (total > done) words.push(`${count(total - done)} not computed`);
    setAttr(element, "aria-label", `${plural(total, "token")}: ${words.join(", ")}`);
    element.title = words.join(", ");
  };
  return { element, update };
}

// Progress from 0 to 1; null: unknown.
export function progressBar(label) {
  const inner = h("i");
  const element = h("div", { class: "progress", role: "progressbar", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100 }, inner);
  const update = (share) => {
    element.classList.toggle("unknown", share === null);
    inner.style.setProperty("--done", `${100 * (share ?? 1)}%`);
    setAttr(element, "aria-valuenow", share === null ? null : Math.round(100 * share));
  };
  return { element, update };
}
