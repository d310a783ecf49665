// What was checked, what was wrong, and what became of it; and the pages and tiers themselves.

import { $, bytes, counted, el, grouped, redraw, say, short } from "./dom.js";

/* Each counter: its id, its name, what it adds up, whether more than nothing is bad. */
const COUNTERS = [
  ["checked", "pages checked", ["dsv4:transfer_items_checked_total"], ""],
  ["climbed", "cache objects checked", ["dsv4:cache_hits_total"], ""],
  ["mismatches", "mismatches", ["dsv4:transfer_mismatches_total", "dsv4:cache_mismatches_total"], "bad"],
  ["stale", "stale reads", ["dsv4:transfer_stale_gets_total"], "warn"],
  ["quarantined", "page groups quarantined", ["dsv4:page_groups_quarantined_total"], "bad"],
  ["recomputed", "prompts recomputed", ["dsv4:prompts_recomputed_total"], "warn"],
];

export function showVerification(numbers) {
  const values = COUNTERS.map(([, , names]) => names.reduce((total, name) => total + numbers.sum(name), 0));
  redraw($("verification"), values, () => COUNTERS.map(([id, name, , tone], index) => {
    const value = values[index];
    return el("div", { class: "figure " + (value && tone), "data-counter": id, "data-value": value },
      el("dt", { text: name }), el("dd", { class: "numbers", text: grouped(value) }));
  }));
  const wrong = values[COUNTERS.findIndex(([id]) => id === "mismatches")];
  $("alarm").hidden = $("alarm-pill").hidden = wrong === 0;
  if (!wrong) return;
  say($("alarm-pill"), counted(wrong, "mismatch", "mismatches"));
  say($("alarm"), counted(wrong, "page") + " did not match " + (wrong === 1 ? "its tag" : "their tags")
    + ". What was wrong was thrown away, and fetched or computed again; no answer rests on it. "
    + "Memory, disk or link are bad: the log names peer, layer and page.");
}

const share = (count, total) => total ? Math.min(100, 100 * count / total) + "%" : "0";

function meter(parts, total) {
  const bar = el("span", { class: "bar", "aria-hidden": "true" });
  for (const [name, count] of parts) {
    const part = el("i", { class: name });
    part.style.width = share(count, total);
    bar.append(part);
  }
  return bar;
}

function poolRow(pool) {
  const busy = Math.max(0, pool.used - pool.cached - pool.quarantined);
  const text = [short(busy) + " in use", short(pool.cached) + " cached"];
  if (pool.quarantined) text.push(pool.quarantined + " quarantined");
  return el("li", { class: "pool" + (pool.quarantined ? " bad" : "") }, el("span", { text: pool.name }),
    meter([["busy", busy], ["cached", pool.cached], ["q", pool.quarantined]], pool.total),
    el("span", { class: "small numbers", text: text.join(", ") + " of " + short(pool.total) }));
}

function tierRow(tier, objects) {
  const room = tier.bytes_max ? " of " + bytes(tier.bytes_max) : "";
  const wrong = tier.mismatches ? el("b", { class: "bad", text: ", " + counted(tier.mismatches, "mismatch", "mismatches") }) : null;
  return el("li", { class: "pool", "data-tier": tier.name }, el("span", { text: tier.name }),
    meter([["cached", tier.bytes]], tier.bytes_max),
    el("span", { class: "small numbers" },
      counted(objects, "object") + ", " + bytes(tier.bytes) + room + ", " + counted(tier.hits, "hit"), wrong));
}

function workerCard({ worker, at, objects }) {
  const head = el("h3", {}, worker.role + " worker", at ? el("span", { class: "small", text: " at " + at }) : null);
  const tiers = worker.tiers || [];
  return el("section", { class: "card" }, head,
    el("h4", { text: "Pages on the device" }), el("ul", {}, ...worker.pools.map(poolRow)),
    tiers.length ? el("h4", { text: "Tiers below" }) : null,
    tiers.length ? el("ul", {}, ...tiers.map((tier) => tierRow(tier, objects[tier.name]))) : null);
}

/* Pages of each pool, and what the tiers below have. */
export function showPages(numbers, stats) {
  const at = stats.processes ? stats.processes.map((process) => [process.address, process.stats]) : [["", stats]];
  const shown = at.flatMap(([address, picture]) => (picture?.workers || []).map((worker) => ({
    at: address,
    worker: { role: worker.role, pools: worker.pools, tiers: worker.tiers },
    objects: Object.fromEntries((worker.tiers || []).map((tier) =>
      [tier.name, objectsIn(numbers, { role: worker.role, tier: tier.name }, address)])),
  })));
  redraw($("pages"), shown, () => shown.map(workerCard));
}

function objectsIn(numbers, labels, address) {
  const all = numbers.select("dsv4:cache_objects", labels).filter((metric) => !address || metric.process === address);
  return all.reduce((total, metric) => total + metric.value, 0);
}
