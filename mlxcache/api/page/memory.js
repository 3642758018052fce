// The two budgets as bars, with what fills them.

import { progressBar } from "./bars.js";
import { byId, h, keyed, setAttr, setText, show } from "./dom.js";
import { bytes, percent, plural, seconds } from "./format.js";
import { on, state } from "./state.js";

const made = {};

const STATES = { loaded: "loaded", loading: "loading", unloaded: "not in memory", never: "loaded at its first request" };
const CAUSES = { idle: "unloaded, it was idle", memory: "unloaded, another model needed its memory", asked: "unloaded on request" };

export function start() {
  made.ram = budget("RAM");
  made.disk = budget("Disk");
  byId("budgets").append(made.ram.element, made.disk.element);
  on(["cache", "tree"], draw);
}

function draw() {
  const { cache } = state;
  if (!cache?.ram) return;
  drawModels(cache);
  drawRanks(cache);
  const shares = held(cache);
  const { ram, disk } = cache;
  const charged = Object.values(ram.kinds ?? {}).reduce((sum, size) => sum + size, 0);
  const weights = ram.kinds?.weights ?? 0;
  const aside = Math.max(0, charged - weights - ram.used_bytes - cache.active_bytes - ram.withheld_bytes);
  made.ram.update(ram.limit_bytes, [
    ["weights", "weights of the models", weights],
    ...split("ram", ram.used_bytes, shares.ram),
    ["using", "running requests", cache.active_bytes],
    ["aside", "reserved for computing and writing", aside],
    ["given", "withheld, the machine is short of memory", ram.withheld_bytes],
  ]);
  const off = !disk.limit_bytes && !disk.used_bytes;
  made.disk.update(disk.limit_bytes, off ? [] : split("disk", disk.used_bytes, shares.disk), diskNote(cache, off));
}

// A bar for each model, if there are several: its state, its weights and its KV, of the budget of all.
function drawModels({ models, memory }) {
  show(byId("models"), Boolean(models));
  if (models) keyed(byId("models"), models, (one) => one.label, () => modelRow(memory.limit_bytes));
}

// A line for each other machine of a model that is divided among several.
function drawRanks({ ranks }) {
  show(byId("ranks"), Boolean(ranks?.others.length));
  if (ranks) keyed(byId("ranks"), ranks.others, (one) => one.rank, rankRow);
}

function rankRow() {
  const name = h("b");
  const figure = h("span", { class: "figure" });
  const element = h("li", {}, h("p", {}, name, figure));
  const update = (one) => {
    const words = [`memory ${bytes(one.footprint_bytes)}`];
    if (one.pressure !== "normal") words.push(`short of memory (${one.pressure})`);
    if (one.disk_used_bytes !== null) words.push(`disk ${bytes(one.disk_used_bytes)}`);
    words.push(`answered ${seconds(one.silent_s)} ago`);
    setText(name, `Rank ${one.rank}`);
    setText(figure, words.join(", "));
  };
  return { element, update };
}

function modelRow(limit) {
  const name = h("b");
  const figure = h("span", { class: "figure" });
  const sizes = { weights: h("i", { class: "weights" }), kv: h("i", { class: "ram" }) };
  const bar = h("div", { class: "budget", role: "img" }, sizes.weights, sizes.kv);
  const progress = progressBar("Loading");
  const element = h("li", {}, h("p", {}, name, figure), bar, progress.element);
  const update = (one) => {
    const weights = one.state === "loaded" || one.state === "loading" ? one.weights_bytes ?? 0 : 0;
    const kv = one.kv_bytes ?? 0;
    const words = [CAUSES[one.unloaded_for] ?? STATES[one.state]];
    if (one.state === "loading" && one.progress != null) words[0] += ` ${percent(one.progress, 1)}`;
    if (weights) words.push(`weights ${bytes(weights)}`);
    if (kv) words.push(`KV ${bytes(kv)}`);
    setText(name, one.label);
    setText(figure, words.join(", "));
    setAttr(element, "data-state", one.state);
    for (const [kind, size] of [["weights", weights], ["kv", kv]]) {
      sizes[kind].style.setProperty("width", `${(100 * size) / Math.max(1, limit)}%`);
      show(sizes[kind], size > 0);
    }
    setAttr(bar, "aria-label", `${one.label}: ${percent(weights + kv, limit)} of the budget`);
    show(progress.element, one.state === "loading");
    progress.update(one.progress ?? null);
  };
  return { element, update };
}

// Bytes of the tier that several sessions share, that one session has alone, and the rest.
function held(cache) {
  const found = { ram: { shared: 0, own: 0 }, disk: { shared: 0, own: 0 } };
  const sizes = new Map((cache.models ?? []).map((one) => [one.label, one.bytes_per_token]));
  for (const node of state.tree?.nodes ?? []) {
    const perToken = sizes.get(node.model) ?? cache.bytes_per_token ?? 0;
    const whose = node.sessions.length > 1 ? "shared" : "own";
    found.ram[whose] += node.ram_tokens * perToken;
    found.disk[whose] += node.disk_tokens * perToken;
  }
  return found;
}

function split(tier, used, { shared, own }) {
  const both = Math.min(shared, used);
  const one = Math.min(own, used - both);
  const rest = tier === "ram" ? "states, and other prefixes" : "states, other prefixes, other models";
  return [
    [`${tier} shared`, "shared by sessions", both],
    [`${tier} own`, "of one session each", one],
    [`${tier} rest`, rest, used - both - one],
  ];
}

function diskNote(cache, off) {
  const { disk } = cache;
  const reason = disk.reason ?? "";
  if (off) return `The disk tier is off: what is evicted from memory is lost. ${reason}`.trim();
  if (disk.state === "suspended") return `The disk cannot be used, and requests are served from memory. ${reason || "See the server's log."}`;
  const waits = cache.pending_bytes ? `${bytes(cache.pending_bytes)} being written. ` : "";
  return `${waits}${plural(disk.files, "file")}, ${bytes(disk.written_bytes ?? 0)} written since the start. ${remoteNote(cache)}`.trim();
}

// The storage that is shared with other servers, if there is one.
function remoteNote({ remote }) {
  if (!remote) return "";
  if (remote.state === "unavailable") return `The remote is not used: ${remote.reason}.`;
  const moved = `Remote: ${bytes(remote.uploaded_bytes)} sent, ${bytes(remote.downloaded_bytes)} received`;
  return remote.state === "ok" ? `${moved}.` : `${moved}; it is not written: ${remote.reason}.`;
}

function budget(name) {
  const figure = h("span", { class: "figure" });
  const bar = h("div", { class: "budget", role: "img" });
  const list = h("ul", { class: "fills" });
  const note = h("p", { class: "note" });
  const element = h("div", { class: "tier" }, h("h3", {}, name, " ", figure), bar, list, note);
  const update = (limit, segments, words = "") => {
    const there = segments.filter(([, , size]) => size > 0);
    const total = (some) => some.reduce((sum, [, , size]) => sum + size, 0);
    const used = total(there);
    const aside = total(there.filter(([kind]) => kind === "aside"));
    const whole = Math.max(limit, used, 1);
    const reserved = aside ? ` used, ${bytes(aside)} reserved,` : "";
    setText(figure, limit ? `${bytes(used - aside)}${reserved} of ${bytes(limit)}` : "off");
    sync(bar, there, () => h("i"), (one, [kind, , size]) => {
      setAttr(one, "class", kind);
      one.style.setProperty("width", `${(100 * size) / whole}%`);
    });
    sync(list, there, () => h("li", {}, h("i"), h("span"), h("b")), (one, [kind, label, size]) => {
      setAttr(one.children[0], "class", `swatch ${kind}`);
      setText(one.children[1], label);
      setText(one.children[2], bytes(size));
    });
    setAttr(bar, "aria-label", `${name}: ${percent(used, whole)} of the budget is taken`);
    setText(note, words);
  };
  return { element, update };
}

function sync(parent, items, make, update) {
  while (parent.children.length > items.length) parent.lastChild.remove();
  items.forEach((item, i) => {
    if (!parent.children[i]) parent.append(make());
    update(parent.children[i], item);
  });
}
