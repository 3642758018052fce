// Short messages at the foot of the page, some with an undo.

import { byId, h, say } from "./dom.js";

const SHOWN_MS = 6000;

// Show `text`; returns a function that removes it.
export function toast(text, { wrong = false, action = null, keep = false, ms = SHOWN_MS } = {}) {
  const words = h("p", {}, text);
  const close = () => {
    clearTimeout(timer);
    element.remove();
  };
  const button = action && h("button", { type: "button", onclick: () => action.run() }, action.name);
  const element = h("div", { class: `toast${wrong ? " wrong" : ""}` }, words, button);
  if (action) element.append(h("i", { class: "fuse", "aria-hidden": "true", style: { "--ms": `${ms}ms` } }));
  byId("toasts").append(element);
  const timer = keep ? 0 : setTimeout(close, ms);
  say(action ? `${text} ${action.name} is possible for ${Math.round(ms / 1000)} seconds.` : text);
  close.set = (now) => (words.textContent = now);
  close.button = button;
  return close;
}

// Run an action, and show its error if it fails.
export async function trying(work) {
  try {
    return await work();
  } catch (error) {
    toast(error.message || "The server cannot be reached.", { wrong: true });
    return null;
  }
}
