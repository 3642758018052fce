// Restoring a session from a snapshot: a file that is chosen, or dropped anywhere on the page.

import { byId, show } from "./dom.js";
import { bytes, percent, plural } from "./format.js";
import { headers, wordsOf } from "./http.js";
import { changed, nameOf, state } from "./state.js";
import { toast, trying } from "./toast.js";

let inside = 0;

export function start() {
  const chooser = byId("restore-file");
  byId("restore").addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", () => {
    restoreAll(chooser.files);
    chooser.value = "";
  });
  addEventListener("dragenter", (event) => over(event, 1));
  addEventListener("dragleave", (event) => over(event, -1));
  addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    inside = 0;
    show(byId("drop"), false);
    restoreAll(event.dataTransfer.files);
  });
}

const hasFiles = (event) => event.dataTransfer?.types.includes("Files");

function over(event, step) {
  if (!hasFiles(event)) return;
  inside = Math.max(0, inside + step);
  show(byId("drop"), inside > 0);
}

async function restoreAll(files) {
  for (const file of [...files]) await trying(() => restore(file));
}

async function restore(file) {
  const close = toast(`Restoring ${file.name}…`, { keep: true });
  try {
    const made = await upload(file, (sent) => close.set(`Restoring ${file.name}: ${percent(sent, file.size)} of ${bytes(file.size)}`));
    state.sessions = [made, ...(state.sessions ?? []).filter((one) => one.id !== made.id)];
    changed("sessions");
    toast(`Restored “${nameOf(made)}”, ${plural(made.tokens, "token")}.`);
  } finally {
    close();
  }
}

// XMLHttpRequest, since fetch does not tell how much of a body has been sent.
function upload(file, progress) {
  return new Promise((resolve, reject) => {
    const sending = new XMLHttpRequest();
    sending.open("POST", "/v1/sessions");
    for (const [name, value] of Object.entries(headers({ "Content-Type": "application/octet-stream" }))) sending.setRequestHeader(name, value);
    sending.upload.addEventListener("progress", (event) => progress(event.loaded));
    sending.addEventListener("load", () => {
      if (sending.status === 201) resolve(JSON.parse(sending.responseText));
      else reject(new Error(wordsOf(sending.responseText) ?? `The server answered ${sending.status}.`));
    });
    sending.addEventListener("error", () => reject(new Error(`${file.name} could not be sent: the server cannot be reached, or refused it.`)));
    sending.send(file);
  });
}
