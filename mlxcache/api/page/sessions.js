// Sessions: name, length, tiers, and actions.

import { byId, h, icon, keyed, setAttr, setText, show } from "./dom.js";
import { ago, bytes, count, plural, seconds } from "./format.js";
import { modelOf, nameOf, on, running, state } from "./state.js";
import { download, fork, isGoing, pin, remove, rename } from "./acts.js";

const TIERS = {
  ram: ["in RAM", "warm; not on disk yet"],
  both: ["in RAM and on disk", "warm; survives a restart"],
  disk: ["on disk", "starts warm, from disk"],
  mixed: ["in both, in parts", "warm for the parts that are stored"],
};

const NONE = "No session yet. Drop a snapshot anywhere on this page to restore one.";
const COMPUTED = "The first session is being computed; it is listed once its reply is complete.";

export function start() {
  on(["sessions", "clock", "going", "requests"], draw);
}

function draw() {
  const all = state.sessions;
  if (!all) return;
  const there = all.filter((one) => !isGoing(one.id));
  keyed(byId("session-rows"), there, (one) => one.id, row);
  show(byId("sessions-wait"), false);
  show(byId("sessions-table"), there.length > 0);
  show(byId("sessions-none"), there.length === 0);
  const computed = running().some((one) => one.api !== "warm");
  setText(byId("sessions-none"), computed ? COMPUTED : NONE);
  setText(byId("sessions-count"), there.length ? plural(there.length, "conversation") : "");
}

function act(name, label, run) {
  return h("button", { type: "button", class: "icon", title: label, onclick: run }, icon(name), h("span", { class: "unseen" }, label));
}

function row(first) {
  let now = first;
  const name = h("b");
  const more = h("span", { class: "soft" });
  const tokens = h("td", { role: "cell", class: "tokens" });
  const lives = h("td", { role: "cell", class: "lives" });
  const used = h("td", { role: "cell", class: "used" });
  const pinned = act("pin", "Pin", () => pin(now));
  const buttons = [
    pinned,
    act("fork", "Fork", () => fork(now)),
    act("pen", "Rename", () => rename(now)),
    act("down", "Download a snapshot", () => download(now)),
    act("bin", "Remove", (event) => remove(now, event.currentTarget)),
  ];
  const element = h("tr", { role: "row", "data-id": first.id }, h("th", { role: "rowheader", scope: "row" }, name, more), tokens, lives, used, h("td", { role: "cell", class: "acts" }, ...buttons));
  const update = (one) => {
    now = one;
    const title = nameOf(one);
    setText(name, title);
    name.title = one.id;
    setText(more, about(one));
    setText(tokens, count(one.tokens));
    drawTier(lives, one);
    setText(used, ago(one.last_used_at));
    setAttr(element, "data-pinned", one.pinned);
    setAttr(pinned, "aria-pressed", one.pinned);
    for (const button of buttons) {
      const label = button.title.split(":")[0];
      setText(button.lastChild, `${label}: ${title}`);
    }
    pinned.title = one.pinned ? "Pinned: its files are evicted last" : "Pin";
  };
  return { element, update };
}

function about(one) {
  const words = [plural(one.turns, "turn")];
  if (one.figures?.requests && !one.figures.generated_tokens) words.push("no reply yet");
  if (modelOf(one)) words.push(modelOf(one));
  if (one.agents) words.push(plural(one.agents, "sub-agent"));
  if (one.client) words.push(one.client);
  if (one.figures?.saved_s >= 1) words.push(`${seconds(one.figures.saved_s)} saved`);
  if (one.figures?.guess_saved_s >= 1) words.push(`${seconds(one.figures.guess_saved_s)} saved by guesses`);
  if (one.name && one.title) words.push(`“${one.title}”`);
  return words.join(" · ");
}

function drawTier(place, one) {
  if (!place.children.length) place.append(h("span", { class: "where" }, h("i"), h("i"), h("b")), h("span", { class: "soft" }));
  const [where, sizes] = place.children;
  const [words, why] = TIERS[one.tier] ?? ["not stored", "its next turn is computed again"];
  const waits = one.tier === "both" || one.tier === "mixed" ? one.tokens - one.durable_tokens : 0;
  setAttr(where.children[0], "class", `pip ram${one.ram_bytes && one.tier !== "disk" ? " on" : ""}`);
  setAttr(where.children[1], "class", `pip disk${one.disk_bytes ? " on" : ""}`);
  setText(where.children[2], words);
  place.title = why;
  const found = [one.ram_bytes && `${bytes(one.ram_bytes)} in RAM`, one.disk_bytes && `${bytes(one.disk_bytes)} on disk`].filter(Boolean);
  if (waits > 64 && waits < one.tokens) found.push(`${plural(waits, "token")} not on disk`);
  setText(sizes, found.join(", "));
}
