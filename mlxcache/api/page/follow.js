// The live stream, read for as long as the page is open, and again after each end of it.

import { events, request } from "./http.js";
import { changed, put, state } from "./state.js";

const WAITS_MS = [500, 1000, 2000, 4000, 8000];

function link(now) {
  state.link = now;
  changed("link");
}

export async function follow() {
  for (let tries = 0; ; tries++) {
    try {
      const response = await request("/v1/live");
      state.requests.clear();
      link("live");
      for await (const { name, data } of events(response)) {
        tries = 0;
        if (name === "end") break;
        put(name, JSON.parse(data));
      }
    } catch (error) {
      console.debug("the live stream ended:", error.message);
    }
    link("lost");
    await new Promise((resolve) => setTimeout(resolve, WAITS_MS[Math.min(tries, WAITS_MS.length - 1)]));
  }
}
