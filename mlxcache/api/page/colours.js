// Light, dark, or as the system has it.

import { byId, say, setText } from "./dom.js";

const KEY = "mlxcache.theme";
const NEXT = { system: "light", light: "dark", dark: "system" };

const chosen = () => document.documentElement.dataset.theme ?? "system";

function name() {
  const now = chosen();
  setText(byId("theme-name"), now === "system" ? "Colours: as the system" : `Colours: ${now}`);
  byId("theme").title = byId("theme-name").textContent;
}

function change() {
  const next = NEXT[chosen()];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    if (next === "system") localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, next);
  } catch {
    // Storage is off: the choice lasts until the page is closed.
  }
  name();
  say(byId("theme-name").textContent);
}

export function start() {
  byId("theme").addEventListener("click", change);
  name();
}
