// Times to the first token and between tokens of the last minutes, from requests that were seen.

import { $, duration, el, redraw, say, svg } from "./dom.js";
import { endOf, isEnded, startOf } from "./way.js";

const MINUTES = 5;
const SAMPLES_MAX = 2000;
const PLOT = { height: 118, left: 52, right: 8, top: 8, bottom: 20 };

const samples = [];
const seen = new Set();

/* Takes in the requests that have ended since the last look. */
function collect(ways, now) {
  for (const [id, way] of ways) {
    const [main] = way;
    if (main.role === "prefill" || !isEnded(way) || main.outcome !== "finished" || seen.has(id)) continue;
    const decode = main.stages.find((stage) => stage.name === "decode");
    if (!decode) continue;
    seen.add(id);
    const [start, end] = [startOf([main]), endOf([main])];
    const between = main.output_tokens > 1 ? (end - decode.at_ms) / (main.output_tokens - 1) : null;
    // By the clock of this page: the server's may be another one.
    samples.push({ at: Date.now() + Math.min(0, end - now), first: decode.at_ms - start, between });
  }
  if (samples.length > SAMPLES_MAX) samples.splice(0, samples.length - SAMPLES_MAX);
  for (const id of seen) if (!ways.has(id)) seen.delete(id);
}

const at = (sorted, share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];

/* Powers of ten around the values, and what lies at each. */
function scaleOf(values) {
  const low = Math.floor(Math.log10(Math.max(0.1, Math.min(...values))));
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(0.1, ...values))));
  const ticks = Array.from({ length: high - low + 1 }, (_, n) => 10 ** (low + n));
  return { ticks, share: (value) => (Math.log10(Math.max(10 ** low, value)) - low) / (high - low) };
}

function plot(points, median, width, label) {
  const inner = { width: width - PLOT.left - PLOT.right, height: PLOT.height - PLOT.top - PLOT.bottom };
  const { ticks, share } = scaleOf(points.map((point) => point.value));
  const x = (age) => PLOT.left + inner.width * (1 - age / (MINUTES * 60000));
  const y = (value) => PLOT.top + inner.height * (1 - share(value));
  const text = (attributes, content) => svg("text", { class: "axis", ...attributes }, content);
  const lines = ticks.flatMap((tick) => [
    svg("line", { class: "grid", x1: PLOT.left, x2: width - PLOT.right, y1: y(tick), y2: y(tick) }),
    text({ x: PLOT.left - 5, y: y(tick) + 4, "text-anchor": "end" }, duration(tick)),
  ]);
  return svg("svg", { width, height: PLOT.height, viewBox: `0 0 ${width} ${PLOT.height}`, role: "img", "aria-label": label },
    ...lines,
    text({ x: PLOT.left, y: PLOT.height - 5 }, MINUTES + " min ago"),
    text({ x: width - PLOT.right, y: PLOT.height - 5, "text-anchor": "end" }, "now"),
    svg("line", { class: "median", x1: PLOT.left, x2: width - PLOT.right, y1: y(median), y2: y(median) }),
    ...points.map((point) => svg("circle", { class: "dot", cx: x(point.age), cy: y(point.value), r: 3 })));
}

function show(id, name, field) {
  const now = Date.now();
  const points = samples
    .map((sample) => ({ age: Math.max(0, now - sample.at), value: sample[field] }))
    .filter((point) => point.value !== null && point.age <= MINUTES * 60000);
  const sorted = points.map((point) => point.value).sort((a, b) => a - b);
  const text = sorted.length === 0 ? "No request has ended in the last " + MINUTES + " minutes." :
    "median " + duration(at(sorted, 0.5)) + ", 95 % within " + duration(at(sorted, 0.95)) + ", "
    + sorted.length + (sorted.length === 1 ? " request" : " requests");
  say($(id + "-text"), text);
  const width = Math.max(260, $(id).clientWidth || 360);
  // Dots move by whole pixels only.
  const shown = { width, points: points.map((point) => ({ ...point, age: Math.round(point.age / 1000) * 1000 })) };
  redraw($(id), shown, () => sorted.length === 0 ? [] : [plot(shown.points, at(sorted, 0.5), width, name + ": " + text)]);
}

export function showLatency(ways, now) {
  collect(ways, now);
  show("ttft", "Time to first token", "first");
  show("itl", "Time between tokens", "between");
}

/* For whoever cannot see dots: the newest samples as a table. */
export function showSamples() {
  if (!$("samples").open) return;
  const newest = samples.slice(-20).reverse();
  redraw($("sample-rows"), newest, () => [el("table", {},
    el("caption", { text: "The newest requests" }),
    el("thead", {}, el("tr", {}, ...["ended", "first token", "between tokens"].map((text) => el("th", { scope: "col", text })))),
    el("tbody", {}, ...newest.map((sample) => el("tr", {},
      el("td", { text: new Date(sample.at).toLocaleTimeString() }),
      el("td", { class: "numbers", text: duration(sample.first) }),
      el("td", { class: "numbers", text: sample.between === null ? "-" : duration(sample.between) })))))]);
}
