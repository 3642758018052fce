// Builds the panels, and opens the live stream.

import { byId, setAttr, setText, show } from "./dom.js";
import { count, plural } from "./format.js";
import { forgetKey, key } from "./http.js";
import { follow } from "./follow.js";
import { on } from "./state.js";
import * as chart from "./chart.js";
import * as chat from "./chat.js";
import * as colours from "./colours.js";
import * as hero from "./hero.js";
import * as losses from "./losses.js";
import * as memory from "./memory.js";
import * as requests from "./requests.js";
import * as restore from "./restore.js";
import * as sessions from "./sessions.js";
import * as tree from "./tree.js";

const LINKS = { connecting: "connecting", live: "live", lost: "not connected" };

function top({ link, server, cache }) {
  setAttr(byId("link"), "data-state", link);
  const waits = server && server.state !== "ready" && link === "live" ? server.state : null;
  setText(byId("link"), waits ?? LINKS[link]);
  const model = server?.model;
  const others = (cache?.models?.length ?? 1) - 1;
  const more = others ? `, and ${plural(others, "more model")}` : "";
  const by = model?.backend === "mlx-vlm" ? ", run by mlx-vlm" : "";
  const sees = model?.input_modalities?.includes("image") ? ", takes images" : "";
  setText(byId("model"), model ? `${model.id}, ${count(model.context_length)} tokens of context${by}${sees}${more}` : "");
  setText(byId("version"), server ? `mlxcache ${server.version}` : "");
  show(byId("forget-key"), key() !== null);
}

for (const panel of [colours, hero, requests, memory, chart, sessions, restore, tree, losses, chat]) panel.start();
byId("forget-key").addEventListener("click", forgetKey);
on(["link", "server", "cache"], top);
follow();
