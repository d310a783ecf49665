// Looks at the server again and again, and tells the parts of the page what it saw.

import { $, say } from "./dom.js";
import { keyGiven, send } from "./api.js";
import { isEnded, waysOf } from "./way.js";

/* Milliseconds between two looks: while this page waits for an answer, while anybody does, and at rest. */
const PACE = { own: 200, busy: 500, rest: 1000 };

const watchers = [];
let isOwn = false;
let isBusy = false;
let wake = () => {};
let isAsked = false;

/* `watch(stats, ways)` is called after each look that the server answered. */
export const onStats = (watch) => watchers.push(watch);

export function hurry(yes) {
  isOwn = yes;
}

/* The next look is at once. */
export function lookNow() {
  isAsked = true;
  wake();
}

function pause() {
  if (isAsked) return Promise.resolve();
  const ms = isOwn ? PACE.own : isBusy ? PACE.busy : PACE.rest;
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    wake = () => {
      clearTimeout(timer);
      resolve();
    };
  });
}

const TONES = { ready: "good", starting: "warn", draining: "warn" };

function showStatus(status, reason) {
  say($("status"), status);
  $("status").title = reason || "";
  $("status").className = "pill " + (TONES[status] || "bad");
  // A start is progress, and no error.
  $("starting").hidden = status !== "starting";
  if (status === "starting") say($("starting-why"), "Starting: " + (reason || "not ready yet"));
  $("trouble").hidden = status === "starting" || !reason;
  say($("trouble"), status === "starting" || !reason ? "" : status + ": " + reason);
}

function showInfo({ info, process }) {
  if (!info) return;
  const facts = [process === "router" ? "router" : "mode " + info.mode, info.numerics + " numerics",
    info.index_key_type + " index keys", info.context_length + " tokens", "layout " + info.fingerprint.slice(0, 12)];
  say($("title"), info.model);
  document.title = info.model + " · dsv4";
  say($("facts"), facts.join(" · "));
}

/* The answer and its JSON; nothing if there is no connection. */
async function reach(path) {
  try {
    const response = await send(path);
    return { response, body: await response.json() };
  } catch {
    return null;
  }
}

async function look() {
  const reached = await reach("stats.json");
  if (!reached) {
    showStatus("no connection", "the server does not answer");
    return;
  }
  const { response, body } = reached;
  if (response.status === 401) {
    showStatus("locked");
    await keyGiven();
    isAsked = true;
    return;
  }
  if (!response.ok) {
    // There is nothing to show yet, and `/health` says why.
    const health = await reach("health");
    showStatus(health?.body.status || "no connection", health?.body.reason);
    return;
  }
  body.now = Date.parse(response.headers.get("date")) || Date.now();
  showStatus(body.health.status, body.health.reason);
  showInfo(body);
  const ways = waysOf(body);
  isBusy = [...ways.values()].some((way) => !isEnded(way));
  for (const watch of watchers) watch(body, ways);
}

/* Never ends. */
export async function watchServer() {
  for (;;) {
    isAsked = false;
    // A fault of the page is told, and does not end the looking.
    await look().catch(reportError);
    await pause();
  }
}
