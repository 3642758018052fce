// Actions on a session. A removal is carried out only after the time to undo it.

import { byId, say, show } from "./dom.js";
import { plural } from "./format.js";
import { headers, key, request, send } from "./http.js";
import { changed, nameOf, state } from "./state.js";
import { toast, trying } from "./toast.js";

const UNDO_MS = 8000;
const path = (session, rest = "") => `/v1/sessions/${encodeURIComponent(session.id)}${rest}`;

// Show a session as the server just returned it, without waiting for the stream.
function replace(session) {
  state.sessions = state.sessions.map((one) => (one.id === session.id ? session : one));
  changed("sessions");
}

export async function pin(session) {
  const now = await trying(() => send("PATCH", path(session), { pinned: !session.pinned }));
  if (!now) return;
  replace(now);
  say(now.pinned ? `Pinned ${nameOf(now)}.` : `${nameOf(now)} is no longer pinned.`);
}

export function rename(session) {
  dialog("Rename", session.name ?? "", { ok: "Save" }, async ({ name }) => {
    replace(await send("PATCH", path(session), { name: name || null }));
    say(name ? `Renamed to ${name}.` : "The name is removed.");
  });
}

export function fork(session) {
  dialog("Fork", `${nameOf(session)}, forked`.slice(0, 200), { ok: "Fork", at: session.tokens }, async ({ name, at }) => {
    const body = { name: name || null };
    if (at) body.at_tokens = at;
    const made = await send("POST", path(session, "/fork"), body);
    state.sessions = [made, ...state.sessions.filter((one) => one.id !== made.id)];
    changed("sessions");
    toast(`Forked: “${nameOf(made)}” continues from the same ${plural(made.tokens, "token")}.`);
  });
}

function dialog(title, name, { ok, at = null }, run) {
  const box = byId("name-dialog");
  const form = byId("name-form");
  const text = byId("name-text");
  const position = byId("name-at");
  byId("name-title").textContent = title;
  byId("name-ok").textContent = ok;
  byId("name-wrong").textContent = "";
  show(byId("name-at-row"), at !== null);
  text.value = name;
  position.value = "";
  if (at !== null) position.max = at;
  form.onsubmit = async (event) => {
    event.preventDefault();
    try {
      await run({ name: text.value.trim(), at: position.value ? Number(position.value) : null });
      box.close();
    } catch (error) {
      byId("name-wrong").textContent = error.message;
    }
  };
  byId("name-cancel").onclick = () => box.close();
  box.showModal();
  text.select();
}

// -- snapshots ----------------------------------------------------------------------------------

export async function download(session) {
  if (key() === null) {
    save(path(session, "/snapshot"), session.id);
    say(`Downloading ${nameOf(session)}.`);
    return;
  }
  // A link cannot carry the key, so the page itself reads the file: straight to disk where it may.
  await trying(async () => {
    const response = await request(path(session, "/snapshot"));
    if (window.showSaveFilePicker && navigator.userActivation?.isActive) {
      const file = await window.showSaveFilePicker({ suggestedName: `${session.id}.safetensors` });
      await response.body.pipeTo(await file.createWritable());
    } else {
      const url = URL.createObjectURL(await response.blob());
      save(url, session.id);
      setTimeout(() => URL.revokeObjectURL(url), 60_000);
    }
    toast(`The snapshot of “${nameOf(session)}” is saved.`);
  });
}

function save(url, id) {
  const link = document.createElement("a");
  link.href = url;
  link.download = `${id}.safetensors`;
  link.click();
}

// -- removal --------------------------------------------------------------------------------------

const going = new Map(); // by session's id: what undoes its removal, and the timer that carries it out

export const isGoing = (id) => going.has(id);

export function remove(session, button) {
  const name = nameOf(session);
  const refocus = nextFocus(button);
  const undo = () => {
    clearTimeout(going.get(session.id).timer);
    going.delete(session.id);
    close();
    changed("going");
    say(`“${name}” was not removed.`);
    requestAnimationFrame(() => requestAnimationFrame(() => backTo(session.id)));
  };
  const close = toast(`Removed “${name}”.`, { action: { name: "Undo", run: undo }, keep: true, ms: UNDO_MS });
  const timer = setTimeout(async () => {
    const focused = close.button === document.activeElement;
    close();
    if (focused) refocus();
    const done = await trying(() => send("DELETE", path(session)));
    if (done) state.sessions = state.sessions.filter((one) => one.id !== session.id);
    going.delete(session.id);
    changed("going");
  }, UNDO_MS);
  going.set(session.id, { timer });
  changed("going");
  close.button.focus();
}

function backTo(id) {
  document.querySelector(`[data-id="${CSS.escape(id)}"] .acts button:last-child`)?.focus();
}

function nextFocus(button) {
  const row = button.closest("tr");
  const near = (row.nextElementSibling ?? row.previousElementSibling)?.dataset.id;
  return () => (near && document.querySelector(`[data-id="${CSS.escape(near)}"]`) ? backTo(near) : byId("h-sessions").focus());
}

// Leaving the page is no undo: pending removals are carried out.
addEventListener("pagehide", () => {
  for (const [id, { timer }] of going) {
    clearTimeout(timer);
    fetch(path({ id }), { method: "DELETE", headers: headers(), keepalive: true });
  }
  going.clear();
});
