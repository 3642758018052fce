// The server's state as last received; panels subscribe to parts of it.

export const state = {
  link: "connecting",
  server: null,
  cache: null,
  requests: new Map(),
  sessions: null,
  tree: null,
};

const KEPT = 150;
const wanting = [];
let due = null;

// Call `draw` soon after any of `parts` has changed; "clock" changes every ten seconds.
export function on(parts, draw) {
  wanting.push({ parts, draw });
}

export function changed(part) {
  if (due === null) {
    due = new Set();
    requestAnimationFrame(redraw);
  }
  due.add(part);
}

function redraw() {
  const parts = due;
  due = null;
  for (const one of wanting) if (one.parts.some((part) => parts.has(part))) one.draw(state);
}

export function put(part, body) {
  if (part === "requests") {
    for (const one of body.data) state.requests.set(one.id, one);
    prune();
  } else if (part === "sessions") state.sessions = body.data;
  else state[part] = body;
  changed(part);
}

function prune() {
  if (state.requests.size <= KEPT) return;
  const old = requests().filter((one) => !one.progress).slice(KEPT);
  for (const one of old) state.requests.delete(one.id);
}

// All requests that are known, newest first.
export function requests() {
  return [...state.requests.values()].sort((a, b) => b.created_at - a.created_at);
}

export const running = () => requests().filter((one) => one.progress).reverse();
export const finished = () => requests().filter((one) => !one.progress && one.status !== "rejected");

export const nameOf = (session) => session.name || session.title || session.label || session.id;

// A request's title: its session's name, or the program that sent it. `session` is a label or an id.
export function titleOf(request) {
  if (request.api === "warm") return "Warming a prefix";
  const { session } = request;
  const alike = session ? state.sessions?.filter((one) => one.label === session || one.id === session) ?? [] : [];
  const found = alike.find((one) => one.model === request.model) ?? alike[0];
  if (found) return nameOf(found);
  if (!state.sessions) return request.client ?? request.session ?? "A request";
  if (request.client) return `${request.session ? "A new session" : "A request"} of ${request.client}`;
  return request.session || "A request";
}

const shortClient = (client) => (client ?? "").split(/[/ _-]/)[0].toLowerCase();

// The short name of a request's client, if requests of several clients are listed; else "".
export function clientOf(request) {
  const all = new Set(requests().map((one) => shortClient(one.client)).filter(Boolean));
  return all.size > 1 ? shortClient(request.client) : "";
}

// The name of the model of a request, a session or a node of the tree, if the server has several; else "".
export const modelOf = (one) => (state.cache?.models ? one.model ?? "" : "");

export const parts = (request) => ({
  ram: request.cached_tokens - request.restored_tokens,
  disk: request.restored_tokens,
  fed: request.fed_tokens,
});

setInterval(() => changed("clock"), 10_000);
