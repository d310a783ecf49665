// The conversation: what is sent, and what comes back.

import { $, el, say } from "./dom.js";
import { Answer } from "./answer.js";
import { errorText, events, newRequestId, send } from "./api.js";
import { hurry, lookNow, onStats } from "./live.js";
import { isEnded } from "./way.js";

const WEATHER = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the weather forecast of a city.",
    parameters: {
      type: "object",
      properties: { city: { type: "string" }, days: { type: "integer" } },
      required: ["city"],
    },
  },
}];
const EXAMPLES = [
  ["Hello, who are you?"],
  ["The code of the red vault in Oslo is 55231.\n\nWhat is the code of the red vault in Oslo?"],
  ["Count from 3 to 9."],
  ["What will the weather be in Lima for the next 3 days?", WEATHER, "with a tool"],
];

const messages = [];
let model = null;
/* The request under way: how to stop it. */
let running = null;
/* Calls that wait for their results. */
let pending = null;
/* Answers whose way is still to be shown, by the id of their request. */
const followed = new Map();

for (const [text, list, note] of EXAMPLES) {
  const ask = () => {
    if (list) $("tools").value = JSON.stringify(list, null, 1);
    submit(text);
  };
  $("examples").append(el("button", { type: "button", text: note ? text + " (" + note + ")" : text, onclick: ask }));
}

const isAtEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 40;
const scroll = (was) => { if (was) $("log").scrollTop = $("log").scrollHeight; };

function addTurn(who, name) {
  $("empty").hidden = true;
  const turn = el("div", { class: "turn " + who, role: "group", "aria-label": name });
  $("log").append(turn);
  scroll(true);
  return turn;
}

function tools() {
  const text = $("tools").value.trim();
  if (!text) return undefined;
  const list = JSON.parse(text);
  if (!Array.isArray(list)) throw new Error("tools must be a list");
  return list.length ? list : undefined;
}

function requestBody() {
  const system = $("system").value.trim();
  const number = (id) => $(id).value === "" ? undefined : Number($(id).value);
  return JSON.stringify({
    model: model || undefined,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    thinking: { type: $("thinking").checked ? "enabled" : "disabled" },
    temperature: number("temperature"),
    max_tokens: number("max"),
    tools: tools(),
  });
}

async function stream(answer, id, signal) {
  const times = { begun: performance.now(), first: null, ended: null };
  const headers = { "content-type": "application/json", "x-request-id": id };
  const response = await send("v1/chat/completions", { method: "POST", headers, body: requestBody(), signal });
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw body?.error || new Error("HTTP " + response.status);
  }
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const was = isAtEnd();
    if (answer.take(JSON.parse(data))) times.first ??= performance.now();
    scroll(was);
  }
  times.ended = performance.now();
  if (!answer.finish) throw new Error("The connection ended before the answer was complete.");
  answer.summarise(times);
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
  // The live view looks more often while somebody waits.
  hurry(controller !== null);
}

async function ask() {
  const id = newRequestId();
  const answer = new Answer(addTurn("assistant", "Answer"));
  answer.turn.dataset.request = id;
  const controller = new AbortController();
  const conversation = messages.at(-1);
  let outcome = "failed";
  followed.set(id, answer);
  setRunning(controller);
  say($("said"), "The answer is being computed.");
  lookNow();
  try {
    await stream(answer, id, controller.signal);
    outcome = "complete";
  } catch (error) {
    if (error.name === "AbortError") {
      outcome = "stopped";
      answer.meta.textContent = "stopped";
    } else answer.fail(errorText(error));
  }
  answer.end();
  setRunning(null);
  // One look more shows how its way ended.
  lookNow();
  say($("said"), outcome === "complete" ? "The answer is complete." : "The answer " + outcome + ".");
  if (messages.at(-1) === conversation) remember(answer, outcome);
}

/* A failed turn is forgotten as a whole, and a stopped one keeps its text: the history that the
   next request sends must hold neither half-checked answers nor calls without results. */
function remember(answer, outcome) {
  const { message } = answer;
  const calls = outcome === "complete" ? message.tool_calls.filter(Boolean) : [];
  delete message.tool_calls;
  if (calls.length) message.tool_calls = calls;
  if (outcome === "failed") {
    const at = messages.findLastIndex((one) => one.role === "user");
    const [lost] = messages.splice(Math.max(0, at));
    // What was not answered can be sent again.
    if (lost && !$("prompt").value) {
      $("prompt").value = lost.content;
      resize();
    }
  } else messages.push(message);
  if (calls.length) {
    pending = answer.askResults(calls, (results) => {
      pending = null;
      answerCalls(calls, results);
      ask();
    });
  } else if ($("key-form").hidden) $("prompt").focus();
}

function answerCalls(calls, results) {
  calls.forEach((call, index) => messages.push({ role: "tool", tool_call_id: call.id, content: results[index] }));
}

function submit(text) {
  text = text.trim();
  if (!text || running) return;
  try {
    tools();
  } catch (error) {
    $("settings").open = true;
    $("tools").focus();
    addTurn("assistant", "Error").append(el("div", { class: "error", role: "alert", text: "Tools: " + error.message }));
    return;
  }
  // Calls that were not answered would make the history invalid.
  if (pending) answerCalls(pending.calls, pending.close());
  pending = null;
  addTurn("user", "You").append(el("div", { class: "text", text }));
  messages.push({ role: "user", content: text });
  $("prompt").value = "";
  resize();
  ask();
}

function resize() {
  const area = $("prompt");
  area.style.height = "auto";
  area.style.height = area.scrollHeight + 2 + "px";
}

function clear() {
  running?.abort();
  messages.length = 0;
  pending = null;
  followed.clear();
  $("log").replaceChildren($("empty"));
  $("empty").hidden = false;
  $("prompt").focus();
}

$("prompt").addEventListener("input", resize);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit($("prompt").value);
});
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  submit($("prompt").value);
});
$("stop").onclick = () => running?.abort();
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
$("clear").onclick = clear;

onStats((stats, ways) => {
  if (stats.info) {
    if (model === null) $("thinking").checked = Boolean(stats.info.default_thinking);
    model = stats.info.model;
  }
  const was = isAtEnd();
  for (const [id, answer] of followed) {
    const way = ways.get(id);
    if (way) answer.follow(way);
    // Whoever is neither under way nor known will not be heard of any more.
    const isOver = way ? isEnded(way) : !answer.turn.hasAttribute("aria-busy");
    if (isOver) followed.delete(id);
  }
  scroll(was);
});
