// The list of requests, each with its way through queue, cache, remote or own prefill, transfer and decode.

import { $, counted, duration, el, redraw, say } from "./dom.js";
import { bars, endOf, isEnded, legend, progressBar, progressOf, stageText, stagesText, startOf, tokensText } from "./way.js";

/* Most rows that are shown at once. */
const ROWS_MAX = 24;
const rows = new Map();

$("legend").append(...legend());

function row(way) {
  const [main] = way;
  const ended = isEnded(way);
  const tone = main.outcome === "failed" ? "bad" : main.outcome === "cancelled" ? "warn" : ended ? "good" : "active";
  const progress = ended ? null : progressOf(way);
  const took = way.some((entry) => entry.stages.length) ? duration(endOf(way) - startOf(way)) : "";
  const head = el("div", { class: "head" },
    el("code", { class: "id", title: main.id, text: main.id.length > 14 ? "…" + main.id.slice(-10) : main.id }),
    el("span", { class: "stage " + tone, text: stageText(way) }),
    el("span", { class: "small numbers", text: took }));
  return [
    head,
    progress && el("div", { class: "progress" }, progressBar(progress, "Prompt tokens that are there"),
      el("span", { class: "small numbers", text: progress.text })),
    ...bars(way),
    el("div", { class: "small numbers", text: [!progress && tokensText(way), stagesText(main)].filter(Boolean).join(" · ") }),
    main.reason && el("div", { class: "small " + tone, text: main.reason }),
  ];
}

/* Those under way first, then the newest. */
function inOrder(ways) {
  const start = (way) => way.some((entry) => entry.stages.length) ? startOf(way) : 0;
  return [...ways].sort(([, a], [, b]) => isEnded(a) - isEnded(b) || start(b) - start(a));
}

export function showRequests(ways) {
  const shown = inOrder(ways).slice(0, ROWS_MAX);
  const items = shown.map(([id, way]) => {
    const item = rows.get(id) || el("li", { class: "request", "data-id": id });
    rows.set(id, item);
    item.dataset.stage = way[0].stage;
    item.dataset.outcome = way[0].outcome || "";
    redraw(item, way, row);
    return item;
  });
  const ids = new Set(shown.map(([id]) => id));
  for (const id of rows.keys()) if (!ids.has(id)) rows.delete(id);
  // Only a new order touches the list, so that reading it is not disturbed.
  const list = $("requests");
  if (items.length !== list.children.length || items.some((item, index) => list.children[index] !== item)) {
    list.replaceChildren(...items);
  }
  const active = [...ways.values()].filter((way) => !isEnded(way)).length;
  say($("requests-note"), ways.size === 0 ? "No requests yet." :
    counted(active, "request") + " under way, " + counted(ways.size - active, "recent one") + " ended"
    + (ways.size > ROWS_MAX ? "; the newest " + ROWS_MAX + " are shown" : "") + ".");
}
