// A small chat: to try the model, and to see how the second turn starts warm.

import { promptBar } from "./bars.js";
import { byId, h, say, setText, show } from "./dom.js";
import { count, percent, plural, seconds } from "./format.js";
import { events, json, request } from "./http.js";
import { on, parts } from "./state.js";

const MOST_TOKENS = 600;
const KINDS = { cold: "cold", warm: "warm", restored: "warm, from disk" };
let messages = [];
let session = "";
let stopping = null;

export function start() {
  fresh();
  on(["cache"], drawModels);
  byId("chat-model").addEventListener("change", fresh);
  byId("chat-new").addEventListener("click", fresh);
  byId("chat-stop").addEventListener("click", () => stopping?.abort());
  byId("chat").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  byId("chat-text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask();
  });
}

// The models to choose from, if there are several; the default one comes first.
function drawModels({ cache }) {
  const names = (cache?.models ?? []).map((one) => one.label);
  const field = byId("chat-model");
  show(field, names.length > 1);
  if (names.join() === [...field.options].map((one) => one.value).join()) return;
  field.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
}

function fresh() {
  stopping?.abort();
  messages = [];
  const drawn = crypto.getRandomValues(new Uint32Array(2));
  session = `dashboard-${[...drawn].map((n) => n.toString(16).padStart(8, "0")).join("")}`;
  byId("talk").replaceChildren();
}

function busy(now) {
  show(byId("chat-send"), !now);
  show(byId("chat-stop"), now);
}

async function ask() {
  const field = byId("chat-text");
  const text = field.value.trim();
  if (!text || stopping) return;
  field.value = "";
  const turn = place(text);
  const talk = messages;
  talk.push({ role: "user", content: text });
  const control = (stopping = new AbortController());
  busy(true);
  try {
    const id = await reply(talk, turn, control.signal);
    await told(id, turn);
  } catch (error) {
    const left = control.signal.aborted;
    if (!turn.said.textContent) talk.pop();
    setText(turn.note, left ? "Stopped. What was computed is kept." : error.message);
    turn.note.classList.toggle("wrong", !left);
  } finally {
    if (turn.said.textContent && talk.at(-1).role === "user") talk.push({ role: "assistant", content: turn.said.textContent });
    stopping = null;
    busy(false);
  }
}

function place(text) {
  const said = h("p", { class: "said" });
  const thought = h("p", { class: "thought" });
  const note = h("p", { class: "note" }, "…");
  const meter = h("div", { class: "meter" });
  byId("talk").append(h("li", { class: "asked" }, h("p", {}, text)), h("li", { class: "answer" }, thought, said, meter, note));
  note.scrollIntoView({ block: "nearest" });
  return { said, thought, note, meter };
}

// Stream a reply into its place; the request's id.
async function reply(talk, turn, signal) {
  const body = { model: byId("chat-model").value || "dashboard", messages: talk, stream: true, max_tokens: MOST_TOKENS };
  const response = await request("/v1/chat/completions", {
    method: "POST",
    body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", "X-Session-Id": session },
    signal,
  });
  for await (const { data } of events(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const delta = chunk.choices?.[0]?.delta ?? {};
    if (delta.reasoning_content) turn.thought.append(delta.reasoning_content);
    if (delta.content) turn.said.append(delta.content);
  }
  return response.headers.get("X-Mlxcache-Request");
}

async function told(id, turn) {
  const one = await json(`/v1/requests/${encodeURIComponent(id)}`);
  const kind = KINDS[one.reuse];
  const bar = promptBar();
  bar.update(parts(one));
  turn.meter.replaceChildren(h("b", { class: "kind", "data-kind": one.reuse }, kind), bar.element);
  const reuse = one.cached_tokens ? `${count(one.cached_tokens)} of ${plural(one.prompt_tokens, "token")} reused (${percent(one.cached_tokens, one.prompt_tokens)})` : `${plural(one.prompt_tokens, "token")} computed`;
  const words = `${reuse}, first word after ${seconds(one.timing.first_token_s)}`;
  setText(turn.note, words);
  say(`The reply is complete. ${kind}: ${words}.`);
}
