// Running and recent requests.

import { progressBar, promptBar } from "./bars.js";
import { byId, h, keyed, setAttr, setText, show } from "./dom.js";
import { about, ago, clock, count, plural, seconds, short } from "./format.js";
import { clientOf, finished, modelOf, on, parts, running, titleOf } from "./state.js";

const FEW = 12;
const MORE = 100;
const PHASES = { queued: "waiting", loading: "loading its model", prefill: "reading the prompt", decode: "writing" };
let shown = FEW;
let several = false;

export function start() {
  on(["requests", "sessions", "clock"], draw);
  on(["cache"], drawIfSeveral);
  byId("recent-more").addEventListener("click", () => {
    shown = shown === FEW ? MORE : FEW;
    draw();
  });
}

// Names of models appear once it is known that there are several.
function drawIfSeveral({ cache }) {
  if (several === Boolean(cache?.models)) return;
  several = Boolean(cache?.models);
  draw();
}

function draw() {
  const now = running();
  const done = finished();
  keyed(byId("running"), now, (one) => one.id, runningRow);
  const waiting = now.filter((one) => one.status === "queued").length;
  const words = now.length ? `${count(now.length - waiting)} running${waiting ? `, ${count(waiting)} waiting` : ""}` : "none running";
  setText(byId("requests-count"), words);
  const listed = done.slice(0, shown);
  const longest = Math.max(1, ...listed.map((one) => one.prompt_tokens));
  keyed(byId("recent-rows"), listed, (one) => one.id, (one) => recentRow(one));
  for (const row of byId("recent-rows").children) row.scale?.(longest);
  show(byId("recent"), listed.length > 0);
  show(byId("recent-none"), !listed.length && !now.length);
  show(byId("recent-more"), done.length > FEW);
  setText(byId("recent-more"), shown === FEW ? `Show all ${Math.min(done.length, MORE)}` : "Show fewer");
}

function runningRow() {
  const title = h("b");
  const model = h("span", { class: "of" });
  const phase = h("span", { class: "phase" });
  const figure = h("span", { class: "figure" });
  const bar = progressBar("Progress");
  const element = h("li", {}, h("p", {}, title, model, phase, figure), bar.element);
  const update = (one) => {
    const { phase: name, done_tokens: done, total_tokens: total, tokens_per_s: speed, left_s: left, share } = one.progress;
    setText(title, titleOf(one));
    setText(model, [clientOf(one), modelOf(one)].filter(Boolean).join(" · "));
    setText(phase, one.progress.phase === "prefill" && !one.cached_tokens && !one.fed_tokens ? "looking for its prefix" : PHASES[name]);
    setAttr(element, "data-phase", name);
    if (name === "queued") setText(figure, `${short(total)} tokens, since ${seconds(Date.now() / 1000 - one.created_at)}`);
    if (name === "loading") setText(figure, `${Math.round(100 * share)}%`);
    if (name === "prefill") setText(figure, `${count(done)} of ${count(total)} tokens${left ? `, about ${about(left)} left` : ""}`);
    if (name === "decode") setText(figure, `${plural(done, "token")}${speed ? `, ${speed < 10 ? speed.toFixed(1) : Math.round(speed)} per second` : ""}`);
    bar.update(name === "loading" ? share : name === "prefill" ? done / Math.max(1, total) : name === "queued" ? 0 : null);
  };
  return { element, update };
}

function recentRow() {
  const when = h("td", { role: "cell", class: "when" });
  const title = h("span");
  const model = h("span", { class: "of" });
  const what = h("td", { role: "cell", class: "what" }, h("div", {}, title, model));
  const bar = promptBar();
  const tokens = h("span", { class: "tokens" });
  const first = h("td", { role: "cell", class: "first" });
  const reply = h("td", { role: "cell", class: "reply" });
  const place = h("div", { class: "prompt" }, bar.element, tokens);
  const element = h("tr", { role: "row" }, when, what, h("td", { role: "cell" }, place), first, reply);
  let last = null;
  element.scale = (longest) => bar.update(parts(last), Math.max(0.04, Math.sqrt(last.prompt_tokens / longest)), last.prompt_tokens);
  const update = (one) => {
    last = one;
    setText(when, ago(one.created_at));
    when.title = clock(one.created_at);
    setText(title, titleOf(one));
    setText(model, [clientOf(one), modelOf(one)].filter(Boolean).join(" · "));
    what.title = `${one.client ?? ""} ${one.id}`.trim();
    setText(tokens, short(one.prompt_tokens));
    setText(first, seconds(one.timing.first_token_s) || "–");
    setAttr(first, "data-kind", one.reuse);
    setText(reply, outcome(one));
    reply.title = guessed(one);
    setAttr(element, "data-status", one.status);
  };
  return { element, update };
}

function outcome(one) {
  if (one.status === "failed") return "failed";
  const { decode_s: spent } = one.timing;
  const many = one.generated_tokens;
  const speed = spent && many > 1 ? (many - 1) / spent : null;
  const words = `${count(many)}${speed ? ` at ${speed < 10 ? speed.toFixed(1) : Math.round(speed)}/s` : ""}`;
  return one.status === "cancelled" ? `${words}, cut` : words;
}

function guessed(one) {
  if (!one.drafted_tokens) return "";
  const from = { draft: "a draft model", heads: "heads" }[one.guess_source] ?? "the conversation";
  const saved = one.guess_saved_s;
  const time = saved < 0 ? `${seconds(-saved)} lost` : `${seconds(saved)} saved`;
  return `${count(one.accepted_tokens)} of ${count(one.drafted_tokens)} tokens from ${from} accepted, in ${plural(one.guess_passes, "pass", "passes")}: ${time}`;
}
