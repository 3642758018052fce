// The prefix tree, as a picture and as a list.

import { byId, h, setAttr, setText, show, svg } from "./dom.js";
import { count, plural } from "./format.js";
import { GAP, placed } from "./layout.js";
import { modelOf, nameOf, on, state } from "./state.js";

const ROW = 44;
const TOP = 26;
const NAMES = 210;
const NARROW = 640;
const FEW = 8;
const OPEN = 3;
const HINT = "Point at a segment, or use the arrow keys, to read its beginning.";
const NAME_FONT = "13px";
const SIZE_FONT = "600 12px";
const pen = document.createElement("canvas").getContext("2d");
let width = 0;
let asList = null;
let drawn = "";

export function start() {
  on(["tree", "sessions"], draw);
  byId("tree-as").addEventListener("click", () => {
    asList = !listed();
    draw();
  });
  new ResizeObserver(([entry]) => {
    const now = Math.round(entry.contentRect.width);
    if (now && now !== width) {
      width = now;
      draw();
    }
  }).observe(byId("tree"));
}

const listed = () => asList ?? width < NARROW;
const nameById = (id) => {
  const found = state.sessions?.find((one) => one.id === id);
  return found ? nameOf(found) : id;
};
const endName = (end) => nameById(end.session) + (end.kind === "agent" ? " (sub-agent)" : "");
const parted = (names, most = 3) =>
  names.length <= most ? names.join(", ") : `${names.slice(0, most).join(", ")} and ${count(names.length - most)} more`;

function draw() {
  const nodes = state.tree?.nodes;
  if (!nodes || !width) return;
  const now = JSON.stringify([nodes, width, listed(), state.sessions?.map(nameOf)]);
  if (now === drawn) return;
  drawn = now;
  const some = nodes.length > 1;
  const shared = nodes.filter((one) => one.sessions.length > 1 && one.tokens).reduce((sum, one) => sum + one.tokens * (one.sessions.length - 1), 0);
  setText(byId("tree-count"), some ? `${plural(nodes.length - 1, "segment")}; ${plural(shared, "token")} shared` : "nothing is cached yet");
  setAttr(byId("tree-as"), "aria-pressed", listed());
  show(byId("tree-picture"), !listed() && some);
  show(byId("tree-list"), listed() && some);
  show(byId("tree-as"), some);
  show(byId("tree-detail"), !listed() && some);
  if (listed()) redrawList(nodes);
  else if (some) picture(nodes);
}

function where(node) {
  const ram = node.ram_tokens >= node.tokens ? "all in RAM" : node.ram_tokens ? `${count(node.ram_tokens)} in RAM` : "none in RAM";
  const disk = node.disk_tokens >= node.tokens ? "all on disk" : node.disk_tokens ? `${count(node.disk_tokens)} on disk` : "none on disk";
  return `${ram}, ${disk}`;
}

function described(node) {
  const whose = node.sessions.length > 1 ? `shared by ${count(node.sessions.length)}: ` : "of ";
  const merged = node.merged.nodes ? ` ${plural(node.merged.nodes, "short branch", "short branches")} not drawn.` : "";
  const model = modelOf(node) ? ` on ${modelOf(node)}` : "";
  return `${plural(node.tokens, "token")} from ${count(node.start)} on, ${whose}${parted(node.sessions.map(nameById))}${model}; ${where(node)}.${merged}`;
}

// -- the picture ----------------------------------------------------------------------------------

function picture(nodes) {
  const { nodes: all, rows, width: wide } = placed(nodes, width - NAMES);
  const height = TOP + rows * ROW;
  const edge = Math.max(width, wide + NAMES);
  const root = svg("svg", { width: edge, height, role: "group", "aria-label": "Prefix tree; arrow keys go from segment to segment" });
  const byNumber = new Map(all.map((one) => [one.id, one]));
  const drawnNodes = all.map((node) => segment(node, edge));
  root.append(...all.flatMap((node) => joints(node, byNumber.get(node.parent))), ...drawnNodes);
  drawnNodes[0]?.setAttribute("tabindex", "0");
  root.addEventListener("keydown", (event) => go(event, all, drawnNodes));
  byId("tree-picture").replaceChildren(root);
  setText(byId("tree-detail"), HINT);
}

const yOf = (node) => TOP + node.row * ROW;

function joints(node, above) {
  const end = [node.x + node.width, yOf(node) + 6];
  const found = above ? [joint([above.x + above.width, yOf(above) + 6], [node.x, yOf(node) + 6])] : [];
  if (node.endRow !== node.row) found.push(joint(end, [end[0] + 16, TOP + node.endRow * ROW + 6]));
  return found;
}

function joint([x, y], [toX, toY]) {
  const bend = y === toY ? `M${x} ${y}H${toX}` : `M${x} ${y}c8 0 8 4 8 8V${toY - 8}c0 6 2 8 8 8`;
  return svg("path", { d: bend, class: "joint" });
}

function segment(node, edge) {
  const y = yOf(node);
  const lane = (kind, tokens, at) => svg("rect", { x: node.x, y: y + at, width: Math.max(0, (node.width * Math.min(tokens, node.tokens)) / Math.max(1, node.tokens)), height: 5, rx: 2.5, class: kind });
  const track = (at) => svg("rect", { x: node.x, y: y + at, width: node.width, height: 5, rx: 2.5, class: "track" });
  const many = node.sessions.length;
  const size = sizeOf(node);
  const names = node.ends.map(endName);
  const element = svg("g", { class: `node${many > 1 ? " shared" : ""}`, tabindex: -1, role: "img", "aria-label": `${described(node)} Begins: ${node.text}` },
    svg("rect", { x: node.x - 4, y: y - 16, width: node.width + 8, height: 32, rx: 6, class: "halo" }),
    track(0), track(7), lane("ram", node.ram_tokens, 0), lane("disk", node.disk_tokens, 7),
    size ? svg("text", { x: node.x, y: y - 6, class: "size" }, size) : null,
    ...(names.length ? ending(node, names, edge) : []));
  const tell = () => setText(byId("tree-detail"), `${described(node)} It begins: ${node.text}`);
  element.addEventListener("pointerenter", tell);
  element.addEventListener("focus", tell);
  return element;
}

// A ring where conversations end, with their names behind it.
function ending(node, names, edge) {
  const apart = node.endRow === node.row ? 0 : 20;
  const [x, y] = [node.x + node.width + apart, TOP + node.endRow * ROW + 6];
  const whole = parted(names, 2);
  const name = shortened(whole, edge - x - 18);
  return [svg("circle", { cx: x, cy: y, r: 4, class: "end" }), svg("text", { x: x + 12, y: y + 4, class: "name" }, name, svg("title", {}, whole))];
}

// The longest wording of a segment's size that ends before the next segment; "" where none does.
function sizeOf(node) {
  const many = node.sessions.length;
  const words = many > 1 ? [`${count(node.tokens)} shared by ${many}`, count(node.tokens)] : [count(node.tokens)];
  const room = node.below.length ? node.width + GAP - 4 : Infinity;
  return words.find((one) => lengthOf(one, SIZE_FONT) <= room) ?? "";
}

// Pixels of a text in the picture.
function lengthOf(words, font) {
  pen.font = `${font} ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(words).width;
}

function shortened(words, room) {
  const letters = [...words];
  let end = letters.length;
  const cut = () => (end < letters.length ? `${letters.slice(0, end).join("").trimEnd()}…` : words);
  while (end > 1 && lengthOf(cut(), NAME_FONT) > room) end--;
  return cut();
}

function go(event, all, drawnNodes) {
  const at = drawnNodes.indexOf(document.activeElement);
  if (at < 0) return;
  const node = all[at];
  const siblings = all.filter((one) => one.parent === node.parent);
  const place = siblings.indexOf(node);
  const next = {
    ArrowRight: node.below[0],
    ArrowLeft: all.find((one) => one.id === node.parent),
    ArrowDown: siblings[place + 1] ?? all[at + 1],
    ArrowUp: siblings[place - 1] ?? all[at - 1],
    Home: all[0],
    End: all.at(-1),
  }[event.key];
  if (!next) return;
  event.preventDefault();
  const to = drawnNodes[all.findIndex((one) => one.id === next.id)];
  drawnNodes[at].setAttribute("tabindex", "-1");
  to.setAttribute("tabindex", "0");
  to.focus();
}

// -- the list ---------------------------------------------------------------------------------------

// Folded: each branch is a line until it is opened, and a long row of branches ends early. What a
// person has opened stays so when the tree is drawn anew, and the focus where it was.
const opened = new Map();
const whole = new Set();

function redrawList(nodes) {
  const place = byId("tree-list");
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  place.replaceChildren(list(nodes));
  if (focused !== undefined) [...place.querySelectorAll("[data-key]")].find((one) => one.dataset.key === focused)?.focus({ preventScroll: true });
}

function list(nodes, parent = 0, path = "") {
  const own = nodes.filter((one) => one.parent === parent);
  const shown = own.length <= FEW + 1 || whole.has(path) ? own : own.slice(0, FEW);
  const open = path === "" && own.length <= OPEN;
  const rest = own.length - shown.length;
  return h("ul", {}, ...shown.map((node) => h("li", {}, branch(nodes, node, path, open))), rest > 0 && h("li", {}, more(rest, nodes, path)));
}

function branch(nodes, node, path, open) {
  const key = `${path}/${node.start} ${node.text.slice(0, 40)}`;
  const ends = node.ends.map(endName);
  const below = nodes.filter((one) => one.parent === node.id).length;
  const share = (tokens) => `${(100 * Math.min(tokens, node.tokens)) / Math.max(1, node.tokens)}%`;
  const lanes = h("span", { class: "lanes", "aria-hidden": "true" }, h("i", { class: "ram", style: { width: share(node.ram_tokens) } }), h("i", { class: "disk", style: { width: share(node.disk_tokens) } }));
  const size = h("span", {}, h("b", {}, plural(node.tokens, "token")), node.sessions.length > 1 ? ` shared by ${count(node.sessions.length)}` : "");
  const names = ends.length > 0 && h("span", { class: "ends" }, parted(ends));
  const many = below > 0 && h("span", { class: "soft" }, `${plural(below, "branch", "branches")} below`);
  const model = path === "" && modelOf(node) && h("span", { class: "soft" }, modelOf(node));
  const summary = h("summary", { "data-key": key }, size, names, model, many, lanes);
  const element = h("details", { open: opened.get(key) ?? open }, summary, h("p", { class: "soft" }, where(node)), h("p", { class: "text" }, node.text), below > 0 && list(nodes, node.id, key));
  summary.addEventListener("click", () => opened.set(key, !element.open));
  return element;
}

function more(rest, nodes, path) {
  const show = () => {
    whole.add(path);
    redrawList(nodes);
  };
  return h("button", { type: "button", class: "quiet", onclick: show }, `Show ${count(rest)} more`);
}
