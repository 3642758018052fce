// Time to the first word, request by request: cold above, warm below, if all is well.

import { byId, h, svg } from "./dom.js";
import { clock, count, median, seconds } from "./format.js";
import { finished, on, titleOf } from "./state.js";

const HEIGHT = 190;
const EDGE = { left: 54, right: 10, top: 12, bottom: 24 };
const MOST = 60;
const KINDS = [["cold", "cold"], ["warm", "warm, from RAM"], ["restored", "warm, from disk"]];
let width = 0;

export function start() {
  on(["requests", "sessions"], draw);
  new ResizeObserver(([entry]) => {
    const now = Math.round(entry.contentRect.width);
    if (now !== width) {
      width = now;
      draw();
    }
  }).observe(byId("chart"));
}

function draw() {
  const done = finished().filter((one) => one.timing.first_token_s > 0 && one.api !== "warm").slice(0, MOST).reverse();
  const place = byId("chart");
  if (!width) return;
  if (done.length < 2) {
    place.replaceChildren(h("p", { class: "empty" }, "The chart needs two requests."));
    return;
  }
  const times = done.map((one) => one.timing.first_token_s);
  const low = Math.floor(Math.log10(Math.max(0.001, Math.min(...times))));
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...times))));
  const y = (s) => EDGE.top + ((high - Math.log10(Math.max(s, 10 ** low))) / (high - low)) * (HEIGHT - EDGE.top - EDGE.bottom);
  const step = (width - EDGE.left - EDGE.right) / done.length;
  const x = (i) => EDGE.left + (i + 0.5) * step;
  const groups = KINDS.map(([kind, name]) => ({ kind, name, middle: median(done.filter((one) => one.reuse === kind).map((one) => one.timing.first_token_s)), many: done.filter((one) => one.reuse === kind).length })).filter((one) => one.many);
  const words = groups.map((one) => `${one.name}: median ${seconds(one.middle)} of ${count(one.many)}`);
  const picture = svg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `Time to the first word of the last ${count(done.length)} requests. ${words.join(". ")}.` });
  picture.append(...grid(low, high, y), ...ends(done, x), ...groups.map((one) => middle(one, y)), ...done.map((one, i) => dot(one, x(i), y)));
  const legend = h("ul", { class: "legend" }, ...groups.map((one) => h("li", {}, h("i", { class: `dot ${one.kind}` }), `${one.name} `, h("b", {}, seconds(one.middle)))));
  place.replaceChildren(picture, legend);
}

function grid(low, high, y) {
  const found = [];
  for (let power = low; power <= high; power++) {
    const at = y(10 ** power);
    found.push(svg("line", { x1: EDGE.left, x2: width - EDGE.right, y1: at, y2: at, class: "grid" }));
    const name = power < 0 ? `${(10 ** power).toFixed(-power)} s` : `${10 ** power} s`;
    found.push(svg("text", { x: EDGE.left - 8, y: at + 4, class: "tick end" }, name));
  }
  return found;
}

function ends(done, x) {
  const at = [[0, "start"], [done.length - 1, "end"]];
  return at.map(([i, side]) => svg("text", { x: side === "start" ? EDGE.left : width - EDGE.right, y: HEIGHT - 6, class: `tick ${side}` }, clock(done[i].created_at)));
}

function middle({ kind, middle: s }, y) {
  return svg("line", { x1: EDGE.left, x2: width - EDGE.right, y1: y(s), y2: y(s), class: `middle ${kind}` });
}

function dot(one, x, y) {
  const kind = one.reuse;
  const at = y(one.timing.first_token_s);
  const shape = kind === "cold"
    ? svg("rect", { x: x - 4, y: at - 4, width: 8, height: 8, class: "dot cold" })
    : kind === "warm"
      ? svg("circle", { cx: x, cy: at, r: 4.5, class: "dot warm" })
      : svg("path", { d: `M${x} ${at - 6}l6 6-6 6-6-6z`, class: "dot restored" });
  shape.append(svg("title", {}, `${titleOf(one)}: ${seconds(one.timing.first_token_s)}, ${kind}`));
  return shape;
}
