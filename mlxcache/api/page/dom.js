// Making and updating elements. Text goes in as text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

// h("button", {class: "icon", onclick: go, "aria-label": "Pin"}, child, "text")
export function h(tag, attrs = {}, ...children) {
  return fill(document.createElement(tag), attrs, children);
}

export function svg(tag, attrs = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attrs, children);
}

function fill(element, attrs, children) {
  for (const [name, value] of Object.entries(attrs)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([k, v]) => element.style.setProperty(k, v));
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((one) => one !== null && one !== undefined && one !== false));
  return element;
}

export function icon(name) {
  return svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));
}

// Set only what differs, so that nothing is announced or drawn anew for nothing.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttr(element, name, value) {
  if (value === null || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
}

export function show(element, visible) {
  if (element.hidden === visible) element.hidden = !visible;
}

const kept = new WeakMap();

// Children of `parent`, one per item, made once and then updated: focus and scroll stay.
// `make(item)` returns {element, update(item)}.
export function keyed(parent, items, keyOf, make) {
  const before = kept.get(parent) ?? new Map();
  const now = new Map();
  const focused = document.activeElement;
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    const row = before.get(key) ?? make(item);
    row.update(item);
    now.set(key, row);
    if (row.element === at) at = at.nextElementSibling;
    else parent.insertBefore(row.element, at);
  }
  for (const [key, row] of before) if (!now.has(key)) row.element.remove();
  kept.set(parent, now);
  if (focused !== document.activeElement && parent.contains(focused)) focused.focus({ preventScroll: true });
}

export function say(text) {
  const place = byId("say");
  place.textContent = "";
  setTimeout(() => (place.textContent = text), 50);
}
