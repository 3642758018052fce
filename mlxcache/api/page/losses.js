// Lost prefixes: cost, the two texts where they differ, and advice.

import { byId, h, keyed, setText, show } from "./dom.js";
import { compared } from "./compare.js";
import { ago, plural, seconds } from "./format.js";
import { finished, on, running, titleOf } from "./state.js";

const MOST = 12;
const REASONS = {
  evicted: "It was evicted to free memory",
  edited: "An earlier message was edited",
  moved: "Text that the client sends anew in each request moved",
  system_changed: "The system prompt changed",
  tools_changed: "The tools changed",
  template_drift: "The chat template rendered an earlier turn differently",
  checkpoint_gap: "No checkpoint was near enough",
  namespace: "It was computed by another model",
  corrupt: "A file on disk was damaged",
  first_seen: "It was never sent before",
};

export function start() {
  on(["requests", "sessions", "clock"], draw);
}

function draw() {
  const found = [...running(), ...finished()].filter((one) => one.lost?.lost_tokens > 0).sort((a, b) => b.created_at - a.created_at).slice(0, MOST);
  keyed(byId("losses"), found, (one) => one.id, card);
  byId("losses").querySelector("details:first-child")?.dataset.touched ?? byId("losses").querySelector("details:first-child")?.setAttribute("open", "");
  show(byId("lost-none"), found.length === 0);
  const tokens = found.reduce((sum, one) => sum + one.lost.lost_tokens, 0);
  setText(byId("lost-count"), found.length ? `${plural(found.length, "prompt")}, ${plural(tokens, "token")} computed again` : "");
}

function card(one) {
  const { lost } = one;
  const title = h("span", { class: "soft" });
  const cost = `${plural(lost.lost_tokens, "token")}, ${seconds(lost.lost_s)}`;
  const cause = lost.cause.replaceAll("_", " ");
  const summary = h("summary", {}, h("b", {}, REASONS[lost.reason] ?? lost.reason), h("span", { class: "cause" }, cause), h("span", { class: "cost" }, cost), title);
  const element = h("details", {}, summary, ...inside(lost));
  summary.addEventListener("click", () => (element.dataset.touched = "yes"));
  return { element, update: (now) => setText(title, `${titleOf(now)}, ${ago(now.created_at)}`) };
}

function inside({ before, after, advice, at_token: at, where }) {
  const place = `${plural(at, "token")} from the start${where ? `, in ${where}` : ""}`;
  const found = [];
  if (before !== after && (before || after)) {
    const [old, now] = compared(before, after);
    found.push(h("div", { class: "texts" }, side("Before", old, "del"), side("This time", now, "ins")));
    found.push(h("p", { class: "note" }, `They differ ${place}.`));
  } else if (after) {
    found.push(h("div", { class: "texts one" }, h("figure", {}, h("figcaption", {}, "Reuse ended here"), h("pre", { tabindex: 0 }, after))));
    found.push(h("p", { class: "note" }, `${place[0].toUpperCase()}${place.slice(1)}; the text itself is the same as before.`));
  }
  if (advice) found.push(h("p", { class: "advice" }, h("b", {}, "What helps "), advice));
  return found;
}

function side(name, pieces, tag) {
  const marked = pieces.map(({ text, differs }) => (differs ? h(tag, {}, text) : h("span", { class: "same" }, text)));
  return h("figure", {}, h("figcaption", {}, name), h("pre", { tabindex: 0 }, ...marked));
}
