// One sentence that says whether the agent is warm, and the figures behind it.

import { byId, h, setAttr, setText } from "./dom.js";
import { bytes, count, median, percent, plural, seconds, short } from "./format.js";
import { finished, on, parts, running, state, titleOf } from "./state.js";

const LOOKED_AT = 20;

export function start() {
  on(["requests", "sessions", "server", "cache", "link"], draw);
}

// The request that the headline is about: the newest that is not a side request, such as a title.
export function telling(list) {
  const lately = list.filter((one) => one.status === "done" && one.api !== "warm").slice(0, LOOKED_AT);
  const longest = Math.max(0, ...lately.map((one) => one.prompt_tokens));
  return lately.find((one) => 4 * one.prompt_tokens >= longest) ?? null;
}

function draw() {
  const { kind, words, why } = verdict();
  const place = byId("verdict");
  setAttr(place, "data-kind", kind);
  const said = words.map((one) => (typeof one === "string" ? one : one.em)).join("");
  if (place.textContent !== said) {
    place.replaceChildren(...words.map((one) => (typeof one === "string" ? one : h("em", {}, one.em))));
  }
  setText(byId("verdict-why"), why);
  drawFigures();
}

function verdict() {
  const { server, link } = state;
  if (link === "lost") return saying("none", ["The server cannot be reached."], "This page updates as soon as it is back.");
  if (server && server.state === "loading") return saying("none", ["The model is loading."], "Requests are accepted once it is loaded.");
  const last = telling(finished());
  if (!last) {
    const now = running().length > 0;
    const how = `Point your agent at ${location.origin}. Every turn after its first starts warm.`;
    return now
      ? saying("cold", ["The first request is being ", { em: "computed" }, "."], "What it computes is kept, so the next turn starts warm.")
      : saying("none", ["No requests yet."], how);
  }
  return sentence(last);
}

const saying = (kind, words, why) => ({ kind, words, why });

export function sentence(one) {
  const first = seconds(one.timing.first_token_s);
  const { fed } = parts(one);
  const name = titleOf(one);
  const reused = `${count(one.cached_tokens)} of ${count(one.prompt_tokens)} tokens`;
  const rest = `${count(fed)} ${fed === 1 ? "was" : "were"} computed, and the first word came after ${first}.`;
  const disk = one.restored_tokens > 0;
  const from = disk ? `were reused, ${count(one.restored_tokens)} of them from disk` : "were in memory already";
  if (one.reuse !== "cold") {
    return saying(disk ? "restored" : "warm", ["Your agent is ", { em: "warm" }, disk ? ", from disk." : "."],
      `Last turn of “${name}”: ${reused} ${from}; ${rest}`);
  }
  const lost = one.lost;
  if (lost && lost.lost_tokens > 0) {
    return saying("cold", ["Your agent went ", { em: "cold" }, "."],
      `“${name}” lost ${plural(lost.lost_tokens, "token")}, about ${seconds(lost.lost_s)} of work. See below where the prompts differ, and what helps.`);
  }
  if (!lost && one.cached_tokens) {
    return saying("cold", ["Your agent sent much that is ", { em: "new" }, "."], `Last turn of “${name}”: ${reused} ${from}; ${rest}`);
  }
  return saying("cold", ["A new conversation: ", { em: "cold" }, ", once."],
    `“${name}” sent ${plural(fed, "new token")}; the first word came after ${first}. Its next turn starts warm.`);
}

function drawFigures() {
  const { tokens, ram, disk } = state.cache ?? {};
  const done = finished().filter((one) => one.status === "done" && one.api !== "warm");
  const time = (kinds) => median(done.filter((one) => kinds.includes(one.reuse)).map((one) => one.timing.first_token_s));
  const warm = time(["warm", "restored"]);
  const cold = time(["cold"]);
  const saved = state.cache?.saved?.seconds;
  const rows = [
    ["of all prompt tokens came from the cache", tokens?.prompt ? percent(tokens.cached, tokens.cached + tokens.fed) : "–"],
    ["of prefixes in RAM", ram ? bytes(ram.used_bytes) : "–"],
    ["of prefixes on disk", disk?.limit_bytes ? bytes(disk.used_bytes) : "–"],
    ["of computing saved since the start", saved ? seconds(saved) : "–"],
    ["to the first word, warm", warm === null ? "–" : seconds(warm)],
    ["to the first word, cold", cold === null ? "–" : seconds(cold)],
  ];
  const place = byId("figures");
  rows.forEach(([name, value], i) => {
    if (!place.children[i]) place.append(h("div", {}, h("dt"), h("dd")));
    setText(place.children[i].firstChild, name);
    setText(place.children[i].lastChild, value);
  });
  document.title = `${running().length ? "● " : ""}${short(state.cache?.tree_tokens)} tokens warm · mlxcache`;
}
