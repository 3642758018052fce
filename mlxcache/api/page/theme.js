// Runs before the page is drawn, so that it is drawn in its colours at once.
"use strict";
(() => {
  try {
    const chosen = localStorage.getItem("mlxcache.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Storage is off: the system's colours it is.
  }
})();
