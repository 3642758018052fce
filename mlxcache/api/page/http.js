// Requests to the server that served this page, with the key if it asks for one.

import { byId } from "./dom.js";

const KEY = "mlxcache.key";
let asking = null;

export const key = () => {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null;
  }
};

export function forgetKey() {
  sessionStorage.removeItem(KEY);
  location.reload();
}

export function headers(more = {}) {
  const found = key();
  return found ? { ...more, Authorization: `Bearer ${found}` } : more;
}

// Returns the response; asks for the key until it is right. Throws an Error with a readable message.
export async function request(path, options = {}) {
  for (;;) {
    const used = key();
    const response = await fetch(path, { ...options, headers: headers(options.headers), cache: "no-store" });
    if (response.status === 401) {
      if (key() === used) await askForKey(used !== null);
      continue;
    }
    if (!response.ok) throw new Error(await told(response));
    return response;
  }
}

export async function json(path, options = {}) {
  return (await request(path, options)).json();
}

export function send(method, path, body) {
  const options = { method };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = { "Content-Type": "application/json" };
  }
  return json(path, options);
}

export async function told(response) {
  const text = await response.text();
  return wordsOf(text) ?? `The server answered ${response.status}.`;
}

export function wordsOf(text) {
  try {
    return JSON.parse(text).error?.message ?? null;
  } catch {
    return null;
  }
}

function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    const field = byId("key");
    byId("key-wrong").textContent = wrong ? "This key is wrong." : "";
    field.value = "";
    const stay = (event) => event.preventDefault();
    dialog.addEventListener("cancel", stay);
    byId("key-form").addEventListener(
      "submit",
      (event) => {
        event.preventDefault();
        sessionStorage.setItem(KEY, field.value.trim());
        field.value = "";
        dialog.removeEventListener("cancel", stay);
        dialog.close();
        asking = null;
        resolve();
      },
      { once: true },
    );
    dialog.showModal();
    field.focus();
  });
  return asking;
}

// Events of a streamed response: yields {name, data}, data as text.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const found = { name: "message", data: "" };
        for (const line of block.split("\n")) {
          if (line.startsWith("event: ")) found.name = line.slice(7);
          else if (line.startsWith("data: ")) found.data += line.slice(6);
        }
        if (found.data) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already, which the loop has thrown
  }
}
