// A request's way through the stages: a bar on a common time line, its text, its progress.

import { counted, duration, el, grouped } from "./dom.js";

const NAMES = {
  queue: "queue", cache: "cache", hand_off: "remote prefill", prefill: "prefill", decode: "decode", ended: "ended",
};
/* Stages in which a prompt is being computed or fetched. */
const PROMPT_STAGES = new Set(["cache", "hand_off", "prefill"]);

/* A decode worker waits for a prompt that another one computes; that one, when it has computed it, for
   the pages to be fetched. */
export const stageName = (name, role) =>
  name === "hand_off" && role === "prefill" ? "transfer" : NAMES[name] || name.replaceAll("_", " ");

/* What the colours and patterns mean. */
export function legend() {
  const stages = Object.keys(NAMES).filter((name) => name !== "ended");
  return stages.map((name) => el("span", { class: "key" },
    el("span", { class: "swatch " + name, "aria-hidden": "true" }), stageName(name)));
}

/* All workers' entries with where they come from, one list whoever serves the page. */
export function entriesOf(stats) {
  const workers = stats.processes
    ? stats.processes.flatMap((process) =>
      (process.stats?.workers || []).map((worker) => [process.address, worker]))
    : (stats.workers || []).map((worker) => ["", worker]);
  return workers.flatMap(([at, worker]) =>
    (worker.requests || []).map((entry) => ({ at, ...entry })));
}

/* Entries of one request: the side that answers first, then the one that only computes. A client may
   use a name again; then the newest request has it, and the others have it with a number. */
export function waysOf(stats) {
  const ways = new Map();
  for (const entry of entriesOf(stats)) {
    const isTaken = (way) => way.some(({ at, role }) => at === entry.at && role === entry.role);
    let key = entry.id;
    for (let n = 2; ways.has(key) && isTaken(ways.get(key)); n += 1) key = entry.id + " " + n;
    if (ways.has(key)) ways.get(key).push(entry);
    else ways.set(key, [entry]);
  }
  for (const way of ways.values()) way.sort((a, b) => (a.role === "prefill") - (b.role === "prefill"));
  return ways;
}

export const isEnded = (way) => way[0].stage === "ended";
export const startOf = (way) => Math.min(...way.flatMap((entry) => entry.stages.map((stage) => stage.at_ms)));
export const endOf = (way) =>
  Math.max(...way.flatMap((entry) => entry.stages.map((stage) => stage.at_ms + stage.ms)));

const shownStages = (entry) => entry.stages.filter((stage) => stage.name !== "ended");

/* "queue 2 ms, remote prefill 340 ms"; stages that came again after a retraction are added up. */
export function stagesText(entry) {
  const sums = new Map();
  for (const stage of shownStages(entry)) sums.set(stage.name, (sums.get(stage.name) || 0) + stage.ms);
  return [...sums].map(([name, ms]) => stageName(name, entry.role) + " " + duration(ms)).join(", ");
}

function lane(entry, from, total) {
  const segments = shownStages(entry).map((stage) => {
    const segment = el("span", { class: "segment " + stage.name, title: stageName(stage.name, entry.role) + " " + duration(stage.ms) });
    segment.style.left = 100 * (stage.at_ms - from) / total + "%";
    segment.style.width = 100 * stage.ms / total + "%";
    return segment;
  });
  const label = entry.role + " worker: " + (stagesText(entry) || stageName(entry.stage, entry.role));
  return el("div", { class: "lane", role: "img", "aria-label": label }, ...segments);
}

/* A lane for each worker that has the request, on one time line. */
export function bars(way) {
  const timed = way.filter((entry) => entry.stages.length);
  if (!timed.length) return [];
  const from = startOf(timed), total = Math.max(1, endOf(timed) - from);
  return timed.map((entry) => {
    const name = way.length > 1 ? el("span", { class: "side", "aria-hidden": "true", text: entry.role }) : null;
    return el("div", { class: "bars" }, name, lane(entry, from, total));
  });
}

/* How much of the prompt is there, while it is not all there; else nothing. Of a prompt that is computed
   by another process a decode worker learns only at the end how much there is. */
export function progressOf(way) {
  const [main] = way;
  if (!PROMPT_STAGES.has(main.stage) || !main.prompt_tokens) return null;
  const done = Math.min(main.prompt_tokens, Math.max(...way.map((entry) => entry.computed_tokens)));
  const of = main.prompt_tokens;
  if (main.stage === "hand_off" && done === 0) return { done: null, of, text: grouped(of) + " prompt tokens, computed there" };
  return { done, of, text: grouped(done) + " of " + grouped(of) + " prompt tokens" };
}

export function progressBar(progress, label) {
  return el("progress", { max: progress.of, value: progress.done, "aria-label": label });
}

/* Where the request is now, for people. */
export function stageText(way) {
  const [main] = way;
  if (main.stage === "ended") return main.outcome || "ended";
  const from = main.stage === "hand_off" && main.peer ? " from " + main.peer.address + " over " + main.peer.transport : "";
  return stageName(main.stage, main.role) + from;
}

/* What it has read and written. */
export function tokensText(way) {
  const [main] = way;
  const cached = main.cached_tokens ? " (" + grouped(main.cached_tokens) + " cached)" : "";
  return counted(main.prompt_tokens, "prompt token") + cached + ", " + grouped(main.output_tokens) + " out";
}
