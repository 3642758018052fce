// Runs before the first paint, so that the page never flashes in other colours.
"use strict";
(() => {
  try {
    const chosen = localStorage.getItem("mlxcache.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Storage is off: use the system's colours.
  }
})();
