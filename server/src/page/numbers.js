// The server's metrics: sums, rates since the look before, and the table of all counters.

import { $, el, redraw, short } from "./dom.js";

const GROUPS = [
  ["Verification", /verif|check|mismatch|quarantin|digest|integrity|recomput|corrupt|stale/],
  ["Transfers", /transfer|handoff|hand_off|lent|peer|link|fetch|pull/],
  ["Prefix cache", /cache|tier|host|disk|evict|prefix|hit/],
  ["Requests and tokens", /./],
];
const ALARM = /mismatch|quarantin|fail|corrupt|stale|recomput|bad/;

/* A router shows its workers' numbers; each process names its own. */
function metricsOf(stats) {
  if (!stats.processes) return stats.metrics || [];
  return stats.processes.flatMap((process) =>
    (process.stats?.metrics || []).map((metric) => ({ ...metric, process: process.address })));
}

const keyOf = (metric) => metric.name + " " + JSON.stringify(metric.labels) + " " + (metric.process || "");

/* The numbers of one look beside those of an earlier one. */
export class Numbers {
  constructor(stats, earlier) {
    this.at = performance.now();
    this.metrics = metricsOf(stats);
    this.values = new Map(this.metrics.map((metric) => [keyOf(metric), metric.value]));
    this.before = earlier?.values;
    this.seconds = earlier ? (this.at - earlier.at) / 1000 : 0;
    // Where a process has a prefill and a decode worker, both count the same request.
    this.hasFront = this.metrics.some(({ labels }) => labels.role && labels.role !== "prefill");
  }

  gain(metric) {
    const old = this.before?.get(keyOf(metric));
    return old === undefined ? 0 : Math.max(0, metric.value - old);
  }

  select(name, labels) {
    return this.metrics.filter((metric) => metric.name === name
      && Object.entries(labels).every(([label, value]) => metric.labels[label] === value));
  }

  sum(name, labels = {}) {
    return this.select(name, labels).reduce((total, metric) => total + metric.value, 0);
  }

  /* The sum over workers that answer clients. */
  front(name) {
    const all = this.select(name, {}).filter(({ labels }) => !(this.hasFront && labels.role === "prefill"));
    return all.reduce((total, metric) => total + metric.value, 0);
  }

  /* How fast a counter grows, per second. */
  rate(name, labels = {}) {
    if (!this.seconds) return 0;
    return this.select(name, labels).reduce((total, metric) => total + this.gain(metric), 0) / this.seconds;
  }
}

function row(numbers, metric, label) {
  const alarm = ALARM.test(metric.name + JSON.stringify(metric.labels)) && metric.value > 0;
  const gain = metric.name.endsWith("_total") && numbers.seconds ? numbers.gain(metric) / numbers.seconds : 0;
  return el("tr", { title: metric.help },
    el("th", { scope: "row", text: label + (metric.process ? " at " + metric.process : "") }),
    el("td", { class: "numbers" + (alarm ? " bad" : ""), text: short(metric.value) }),
    el("td", { class: "numbers soft", text: gain ? "+" + short(gain) + "/s" : "" }));
}

function nameOf(metric) {
  const name = metric.name.replace(/^[^:]*:/, "").replace(/_total$/, "").replaceAll("_", " ");
  const labels = Object.values(metric.labels).join(" ");
  return labels ? name + " (" + labels + ")" : name;
}

/* The table of everything that is counted, while it is open. */
export function showCounters(numbers) {
  $("counters").hidden = numbers.metrics.length === 0;
  if (!$("counters").open) return;
  const tables = new Map(GROUPS.map(([name]) => [name, []]));
  for (const metric of numbers.metrics) {
    if (metric.name === "dsv4:pages" || (metric.value === 0 && !$("zeros").checked)) continue;
    const [group] = GROUPS.find(([, pattern]) => pattern.test(metric.name));
    tables.get(group).push(row(numbers, metric, nameOf(metric)));
  }
  const shown = [...tables].filter(([, rows]) => rows.length);
  $("rows").replaceChildren(...shown.map(([name, rows]) =>
    el("table", {}, el("caption", { text: name }), el("tbody", {}, ...rows))));
}

/* The few numbers that say how it goes. */
export function showFigures(numbers, stats) {
  const answers = stats.processes ? stats.processes.map((process) => process.stats || {}) : [stats];
  const total = (name) => answers.reduce((sum, { http }) => sum + (http?.[name] || 0), 0);
  const speed = ["decode", "unified"].reduce((sum, role) =>
    sum + numbers.rate("sglang:generation_tokens_total", { role }), 0);
  const prompts = total("prompt_tokens");
  const figures = [
    ["running", short(numbers.front("sglang:num_running_reqs"))],
    ["queued", short(numbers.front("sglang:num_queue_reqs"))],
    ["tokens/s", speed ? speed.toFixed(1) : "0"],
    ["from cache", prompts ? Math.round(100 * total("cached_tokens") / prompts) + " %" : "-"],
    ["handed over", short(numbers.front("dsv4:handoffs_total"))],
    ["requests", short(total("requests"))],
  ];
  redraw($("figures"), figures, () => figures.map(([name, value]) =>
    el("div", { class: "figure" }, el("dt", { text: name }), el("dd", { class: "numbers", text: value }))));
}
