// Asking the server: with its API key where it wants one, and reading streams of events.

import { $, say } from "./dom.js";

// The key is kept for this tab alone.
const STORED = "api-key";
let key = sessionStorage.getItem(STORED) || "";
let given = [];

/* Asks as `fetch` does. An answer of 401 shows the form that asks for a key. */
export async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = "Bearer " + key;
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401) wantKey();
  else if (response.ok) $("key-form").hidden = true;
  return response;
}

function wantKey() {
  say($("key-why"), key ? "The server did not accept this API key." : "This server wants an API key.");
  if (!$("key-form").hidden) return;
  $("key-form").hidden = false;
  $("key").focus();
}

/* Resolves when somebody has typed a key. */
export const keyGiven = () => new Promise((resolve) => given.push(resolve));

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem(STORED, key);
  $("key").value = "";
  $("key-form").hidden = true;
  $("prompt").focus();
  const waiting = given;
  given = [];
  for (const resolve of waiting) resolve();
});

/* A name for a request that the server takes over, so that its way can be followed at once. Works
   where `crypto.randomUUID` does not: on pages that came over plain HTTP. */
export function newRequestId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return "page-" + Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/* Data of the server-sent events of an answer, one after the other. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const frame = text.slice(0, end);
      text = text.slice(end + 2);
      if (frame.startsWith("data: ")) yield frame.slice(6);
    }
  }
}

/* An error of the API, or whatever else went wrong, in one line. */
export function errorText(error) {
  return error.code ? error.message + " (" + error.code + ")" : error.message || String(error);
}
