// The page: a chat on one side, the running system on the other.

import "./chat.js";
import { $ } from "./dom.js";
import { showLatency, showSamples } from "./latency.js";
import { onStats, watchServer } from "./live.js";
import { Numbers, showCounters, showFigures } from "./numbers.js";
import { showRequests } from "./requests.js";
import { showTopology } from "./topology.js";
import { showPages, showVerification } from "./verification.js";

/* Rates are those of about the last second, however often the page looks. */
const RATE_MS = 1000;
const looks = [];
let latest = null;

function show() {
  const { stats, ways } = latest;
  const numbers = looks.at(-1);
  showFigures(numbers, stats);
  showTopology(stats, numbers);
  showRequests(ways);
  showVerification(numbers);
  showPages(numbers, stats);
  showLatency(ways, stats.now);
  showSamples();
  showCounters(numbers);
}

onStats((stats, ways) => {
  const numbers = new Numbers(stats, looks[0]);
  looks.push(numbers);
  while (looks.length > 2 && numbers.at - looks[1].at >= RATE_MS) looks.shift();
  latest = { stats, ways };
  show();
});

const again = () => { if (latest) show(); };
$("zeros").onchange = $("counters").ontoggle = $("samples").ontoggle = again;
window.addEventListener("resize", again);

/* On a narrow screen one of both sides is shown. */
function choose(view) {
  document.body.dataset.view = view;
  for (const name of ["chat", "live"]) $("tab-" + name).setAttribute("aria-pressed", String(name === view));
  again();
}
$("tab-chat").onclick = () => choose("chat");
$("tab-live").onclick = $("alarm-pill").onclick = () => choose("live");

watchServer();
