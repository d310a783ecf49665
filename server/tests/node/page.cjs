// Uses the web page of a running server in a browser, as a person would.
//
// Usage: node page.cjs URL CHECK... Prints `ok CHECK` for each check that holds; the first one that
// does not ends the program with its error and exit code 1.

"use strict";

const assert = require("node:assert/strict");
const { PHONE, Visit, launch, unnamedThings, weakTexts } = require("./browser.cjs");

const FACT = "The code of the red vault in Oslo is 55231.";
const QUESTION = "What is the code of the red vault in Oslo?";
const RECALL = `${FACT}\n\n${QUESTION}`;
const FILLER = "The sky over Oslo is blue today. ";
const RESULT = '{"sky": "sunny", "celsius": 21}';
const BAD_REQUEST = "status of 400";
const UNAUTHORIZED = "status of 401";

let url = null;
let browser = null;

/* A prompt that takes a while; each name gives another one, so that no cache has it. */
const long = (name, sentences = 400) => `Note ${name}. ${FACT} ${FILLER.repeat(sentences)}\n\n${QUESTION}`;
const open = (options) => Visit.open(browser, url, options);

/* Row of an answer's request in the list; `at` narrows it to a moment. */
async function rowOf(turn, at = "") {
  const id = await turn.getAttribute("data-request");
  return turn.page().locator(`#requests li[data-id="${id}"]${at}`);
}

/* A request that somebody else has sent, and its end. */
function another(text) {
  const body = { messages: [{ role: "user", content: text }], max_tokens: 4, temperature: 0 };
  const headers = { "content-type": "application/json" };
  return fetch(`${url}/v1/chat/completions`, { method: "POST", headers, body: JSON.stringify(body) });
}

/* Collects in the page what it showed, moment by moment: whatever a person could have seen. */
const record = (visit) => visit.page.evaluate(() => {
  const seen = { stages: [], progress: [], calls: 0 };
  const add = (list, value) => { if (value !== undefined && list.at(-1) !== value) list.push(value); };
  const look = () => {
    const turn = [...document.querySelectorAll(".turn.assistant")].at(-1);
    const row = turn && document.querySelector(`#requests li[data-id="${turn.dataset.request}"]`);
    add(seen.stages, row?.dataset.stage);
    const progress = row?.querySelector("progress[value]");
    if (progress) add(seen.progress, progress.value / progress.max);
    if (document.querySelector(".turn[aria-busy] .call code")?.textContent) seen.calls += 1;
  };
  new MutationObserver(look).observe(document.body, { subtree: true, childList: true, characterData: true, attributes: true });
  window.seen = seen;
});
const recorded = (visit) => visit.page.evaluate(() => window.seen);

/* Focuses with the keyboard alone, and looks whether that can be seen. */
async function tabbed(visit) {
  await visit.page.keyboard.press("Tab");
  return visit.page.evaluate(() => {
    const node = document.activeElement;
    const style = getComputedStyle(node);
    return { id: node.id || node.className || node.tagName, outline: style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth) };
  });
}

const checks = {
  async check_loads_alone_and_without_errors() {
    const visit = await open();
    const headers = visit.response.headers();
    assert.match(headers["content-security-policy"], /^default-src 'self';/);
    assert.doesNotMatch(headers["content-security-policy"], /unsafe|https?:/);
    assert.equal(await visit.page.title(), "dsv4-mini · dsv4");
    await visit.page.locator("#topology svg").waitFor();
    await visit.close();
  },

  async check_chat_recalls_and_goes_on() {
    const visit = await open();
    assert.equal(await visit.ask(RECALL), FACT);
    // The second answer needs the first message: the conversation is sent as a whole.
    assert.equal(await visit.ask(QUESTION), FACT);
    const meta = await visit.page.locator(".turn.assistant .meta").first().innerText();
    assert.match(meta, /^stop · \d+ prompt tokens.* · \d+ generated · .*first after \d+ ms$/);
    await visit.page.getByRole("button", { name: "New chat" }).waitFor({ state: "hidden" });
    await visit.settings();
    await visit.page.getByRole("button", { name: "New chat" }).click();
    assert.equal(await visit.page.locator(".turn").count(), 0);
    await visit.close();
  },

  async check_thinking_is_shown() {
    const visit = await open();
    await visit.setThinking(true);
    const turn = await visit.send(RECALL);
    const answer = await visit.answered(turn);
    assert.ok(answer.includes("55231"), answer);
    const reasoning = turn.locator(".reasoning");
    assert.ok((await reasoning.locator(".text").textContent()).includes("55231"));
    assert.equal(await reasoning.getAttribute("open"), null, "it is folded once the answer is there");
    await reasoning.locator("summary").click();
    assert.ok(await reasoning.locator(".text").isVisible());
    await visit.close();
  },

  async check_tool_call_is_shown_and_answered() {
    const visit = await open();
    await record(visit);
    await visit.page.getByRole("button", { name: /weather be in Lima/ }).click();
    const turn = visit.page.locator(".turn.assistant").first();
    const call = turn.getByRole("group", { name: "Call of the tool get_weather" });
    const result = call.getByLabel("Result of get_weather");
    await result.waitFor();
    assert.deepEqual(JSON.parse(await call.locator("code").innerText()), { city: "Lima", days: 3 });
    assert.ok((await recorded(visit)).calls > 0, "the call was to be seen before the answer was complete");
    assert.ok(await result.evaluate((node) => node === document.activeElement), "the result can be typed at once");
    await result.fill(RESULT);
    await visit.page.keyboard.press("Enter");
    const final = visit.page.locator(".turn.assistant").nth(1);
    await final.waitFor();
    assert.equal(await visit.answered(final), "It is sunny in Lima, 21 degrees.");
    await visit.close();
  },

  async check_tools_that_are_no_list_are_refused() {
    const visit = await open();
    await visit.settings();
    await visit.page.getByLabel("Tools (JSON list, as in the API)").fill("{");
    const turn = await visit.send("Hi");
    assert.match(await turn.getByRole("alert").innerText(), /^Tools: /);
    await visit.close();
  },

  async check_stop_ends_the_request() {
    const visit = await open();
    const turn = await visit.send(long("of what is stopped", 500));
    await turn.locator("progress").waitFor();
    await visit.page.getByRole("button", { name: "Stop" }).click();
    await visit.answered(turn);
    assert.equal(await turn.locator(".meta").innerText(), "stopped");
    await (await rowOf(turn, "[data-stage=ended][data-outcome=cancelled]")).waitFor();
    // So does a new chat, and it goes on as if nothing had been.
    const left = await visit.send(long("of what is left", 500));
    await left.locator("progress").waitFor();
    const row = await rowOf(left, "[data-stage=ended][data-outcome=cancelled]");
    await visit.settings();
    await visit.page.getByRole("button", { name: "New chat" }).click();
    await row.waitFor();
    assert.equal(await visit.ask(RECALL), FACT);
    await visit.close();
  },

  async check_an_error_is_shown_and_the_text_kept() {
    const visit = await open();
    const text = FILLER.repeat(4000).trim();
    const turn = await visit.send(text);
    const error = turn.getByRole("alert");
    await error.waitFor();
    assert.match(await error.innerText(), /tokens/);
    assert.equal(await visit.page.getByLabel("Message", { exact: true }).inputValue(), text);
    assert.equal(await visit.ask(RECALL), FACT);
    await visit.close(BAD_REQUEST);
  },

  async check_a_hand_off_is_seen_while_it_happens() {
    const visit = await open();
    await record(visit);
    const [checked, text] = [await visit.counter("checked"), long("of a hand-off")];
    const turn = await visit.send(text);
    // Each of these is waited for while the prompt is on its way; they would not come after it.
    const row = await rowOf(turn);
    await (await rowOf(turn, "[data-stage=hand_off] progress")).waitFor();
    await visit.page.locator("#topology .link.active", { hasNotText: "HTTP" }).waitFor();
    await visit.page.locator("#links li[data-moving=true]", { hasText: "pages moving" }).waitFor();
    await turn.locator(".way [data-stage=hand_off]", { hasText: /remote prefill from .* over / }).waitFor();
    assert.equal(await visit.answered(turn), FACT);
    await (await rowOf(turn, "[data-stage=ended][data-outcome=finished]")).waitFor();
    const seen = await recorded(visit);
    const order = ["hand_off", "decode", "ended"].map((stage) => seen.stages.indexOf(stage)).filter((at) => at >= 0);
    assert.ok(seen.stages.includes("hand_off") && seen.stages.at(-1) === "ended", seen.stages.join());
    assert.deepEqual(order, [...order].sort((a, b) => a - b), seen.stages.join());
    assert.match(await row.innerText(), /queue .*remote prefill .*decode /);
    assert.ok(await row.locator(".segment.hand_off").count() >= 1);
    await turn.locator(".way [data-stage=ended]").waitFor();
    await visit.page.waitForFunction((least) => Number(document.querySelector("[data-counter=checked]").dataset.value) > least, checked);
    assert.equal(await visit.counter("mismatches"), 0);
    await visit.page.locator("#ttft .dot").first().waitFor();
    assert.match(await visit.page.locator("#ttft-text").innerText(), /^median .* 95 % within .* request/);
    await visit.close();
  },

  async check_both_workers_show_their_side() {
    const visit = await open();
    await record(visit);
    const turn = await visit.send(long("of both sides"));
    await (await rowOf(turn, " .segment.prefill")).waitFor();
    await visit.page.locator("#topology .box", { hasText: "prefill worker" }).waitFor();
    await visit.page.locator("#topology .box", { hasText: "decode worker" }).waitFor();
    assert.equal(await visit.page.locator("#topology .link").count(), 1, "one link, named by both");
    await visit.page.locator("#topology .link.active", { hasNotText: "HTTP" }).waitFor();
    await turn.locator(".way", { hasText: / [\d,]+ of 4,\d+ prompt tokens/ }).waitFor();
    await visit.page.waitForFunction(() => document.querySelector("#requests progress")?.position > 0.2);
    await visit.picture("desktop-light");
    await visit.page.emulateMedia({ colorScheme: "dark" });
    await visit.picture("desktop-dark");
    await visit.page.emulateMedia({ colorScheme: "light" });
    await visit.answered(turn);
    await (await rowOf(turn, "[data-stage=ended]")).waitFor();
    assert.equal(await (await rowOf(turn)).locator(".lane").count(), 2);
    const { progress } = await recorded(visit);
    assert.ok(progress.length >= 3 && progress.some((share) => share > 0 && share < 1), "the progress moved: " + progress);
    assert.deepEqual(progress, [...progress].sort((a, b) => a - b), "it never goes back");
    await visit.close();
  },

  async check_a_request_waits_in_the_queue() {
    const visit = await open();
    const first = another(long("of another"));
    await visit.page.locator("#requests li:not([data-id^=page-]):not([data-stage=ended]):not([data-stage=queue])").waitFor();
    const turn = await visit.send(RECALL);
    await (await rowOf(turn, "[data-stage=queue]")).waitFor();
    await turn.locator(".way [data-stage=queue]").waitFor();
    assert.equal(await visit.answered(turn), FACT);
    assert.equal((await first).status, 200);
    await visit.close();
  },

  async check_topology_of_a_router() {
    const visit = await open();
    await visit.page.locator("#topology .box", { hasText: "router" }).waitFor();
    await visit.page.locator("#topology .box", { hasText: "decode worker" }).waitFor();
    await visit.page.locator("#topology .box", { hasText: "prefill worker" }).waitFor();
    await visit.page.locator("#links li", { hasText: /decode worker .* ← prefill worker/ }).waitFor();
    await visit.picture("router");
    await visit.close();
  },

  async check_a_key_is_asked_for_in_the_page() {
    const visit = await open({ isReady: false });
    await visit.status("locked");
    const key = visit.page.getByLabel("API key");
    assert.ok(await key.evaluate((node) => node === document.activeElement), "it can be typed at once");
    await key.fill("wrong");
    await visit.page.keyboard.press("Enter");
    await visit.page.getByText("did not accept this API key").waitFor();
    await key.fill("sk-page");
    await visit.page.getByRole("button", { name: "Use this key" }).click();
    await visit.status("ready");
    assert.ok(!(await key.isVisible()));
    assert.equal(await visit.ask(RECALL), FACT);
    await (await rowOf(visit.page.locator(".turn.assistant"), "[data-stage=ended]")).waitFor();
    await visit.page.reload();
    await visit.status("ready");
    assert.ok(!(await key.isVisible()), "this tab keeps it");
    await visit.close(UNAUTHORIZED);
  },

  async check_a_start_is_progress() {
    const visit = await open({ isReady: false });
    await visit.status("starting");
    const starting = visit.page.locator("#starting");
    await starting.getByRole("progressbar").waitFor();
    assert.match(await starting.innerText(), /^Starting: ./);
    assert.equal(await visit.page.locator("#trouble").isVisible(), false);
    assert.doesNotMatch(await visit.page.locator("#status").getAttribute("class"), /bad/);
    console.log("seen starting");
    await visit.status("ready");
    await starting.waitFor({ state: "hidden" });
    await visit.close();
  },

  async check_a_phone_shows_all_of_it() {
    const visit = await open({ viewport: PHONE, hasTouch: true, isMobile: true });
    // Neither the page nor a part of it scrolls sideways.
    const sideways = () => visit.page.evaluate(() => [document.documentElement, ...document.querySelectorAll("body, #log, #live, #form")]
      .filter((node) => node.scrollWidth > node.clientWidth).map((node) => node.id || node.tagName));
    const fits = async (when) => assert.deepEqual(await sideways(), [], when);
    await fits("at first");
    await visit.page.getByRole("button", { name: /weather be in Lima/ }).click();
    await visit.page.getByLabel("Result of get_weather").waitFor();
    await fits("with a tool call");
    await visit.picture("phone-tool-call");
    await visit.settings();
    await fits("with settings");
    await visit.page.locator("#settings > summary").click();
    await visit.ask("x".repeat(300));
    await fits("with a long word");
    const turn = await visit.send(long("of a phone"));
    await turn.locator(".way progress").waitFor();
    await visit.picture("phone-chat");
    assert.equal(await visit.page.locator("#live").isVisible(), false);
    await visit.page.getByRole("button", { name: "Live" }).click();
    assert.equal(await visit.page.locator("#chat").isVisible(), false);
    await (await rowOf(turn)).waitFor();
    await visit.page.locator("#topology .link.active", { hasNotText: "HTTP" }).waitFor();
    await visit.picture("phone-live");
    await fits("with the live view");
    const wide = await visit.page.evaluate(() => [...document.querySelectorAll("#live *")]
      .filter((node) => node.getBoundingClientRect().right > innerWidth + 0.5).map((node) => node.outerHTML.slice(0, 80)));
    assert.deepEqual(wide, []);
    await visit.page.getByRole("button", { name: "Chat", exact: true }).click();
    await visit.answered(turn);
    await fits("with an answer");
    await visit.close();
  },

  async check_the_keyboard_is_enough() {
    const visit = await open();
    // Once around and on: it begins in the field for a message, where it is left when the page comes.
    let stops = [];
    for (let n = 0; n < 40; n += 1) stops.push(await tabbed(visit));
    stops = stops.slice(stops.findIndex(({ id }) => id === "skip"));
    for (const stop of stops.filter(({ id }) => id !== "BODY")) assert.ok(stop.outline >= 2, "focus is to be seen: " + stop.id);
    const order = stops.map(({ id }) => id);
    const at = ["skip", "log", "prompt", "send", "live"].map((id) => order.indexOf(id));
    assert.ok(at.every((place) => place >= 0), "all are reached: " + order);
    assert.deepEqual(at, [...at].sort((a, b) => a - b), "in the order of reading: " + order);
    while ((await tabbed(visit)).id !== "skip");
    await visit.page.keyboard.press("Enter");
    await visit.page.keyboard.type("Count from 3 to 9.");
    await visit.page.keyboard.press("Enter");
    const turn = visit.page.locator(".turn.assistant").first();
    await turn.waitFor();
    assert.match(await visit.answered(turn), /3.*9/s);
    // A new line needs a modifier, and Escape stops.
    await visit.page.keyboard.type("one");
    await visit.page.keyboard.press("Shift+Enter");
    await visit.page.keyboard.type("two");
    assert.equal(await visit.page.getByLabel("Message", { exact: true }).inputValue(), "one\ntwo");
    const stopped = await visit.send(long("of a key"));
    await stopped.locator("progress").waitFor();
    await visit.page.keyboard.press("Escape");
    await visit.answered(stopped);
    assert.equal(await stopped.locator(".meta").innerText(), "stopped");
    await visit.close();
  },

  async check_everything_has_a_name() {
    const visit = await open();
    await visit.page.getByRole("button", { name: /weather be in Lima/ }).click();
    await visit.page.getByLabel("Result of get_weather").waitFor();
    const turn = await visit.send(long("of names"));
    await turn.locator("progress").waitFor();
    await (await rowOf(turn, " progress")).waitFor();
    assert.deepEqual(await visit.page.evaluate(unnamedThings), []);
    await visit.answered(turn);
    await visit.page.locator("#ttft .dot").first().waitFor();
    await visit.page.getByRole("heading", { name: "Verification" }).evaluate((node) => node.scrollIntoView());
    await visit.picture("details");
    await visit.page.locator("#counters > summary").click();
    await visit.page.locator("#samples > summary").click();
    await visit.page.locator("#rows table").first().waitFor();
    await visit.page.locator("#sample-rows td").first().waitFor();
    assert.deepEqual(await visit.page.evaluate(unnamedThings), []);
    await visit.close();
  },

  async check_dark_and_light_can_be_read() {
    const visit = await open();
    await visit.setThinking(true);
    const turn = await visit.send(RECALL);
    await visit.answered(turn);
    await (await rowOf(turn, "[data-stage=ended]")).waitFor();
    await visit.page.locator("#counters > summary").click();
    const grounds = [];
    for (const colorScheme of ["light", "dark"]) {
      await visit.page.emulateMedia({ colorScheme });
      grounds.push(await visit.page.evaluate(() => getComputedStyle(document.body).backgroundColor));
      assert.deepEqual(await visit.page.evaluate(weakTexts, 4.5), [], colorScheme);
    }
    assert.notEqual(grounds[0], grounds[1]);
    await visit.close();
  },

  async check_a_mismatch_is_loud() {
    const visit = await open();
    assert.ok(await visit.page.locator("#alarm").isHidden());
    // Real pages are right: the number alone is made up.
    await visit.page.route("**/stats.json", async (route) => {
      const response = await route.fetch();
      const stats = await response.json();
      for (const metric of (stats.processes?.[0].stats || stats).metrics) {
        if (metric.name === "dsv4:transfer_mismatches_total") metric.value = 2;
      }
      await route.fulfill({ response, json: stats });
    });
    const alarm = visit.page.locator("#live").getByRole("alert");
    await alarm.waitFor();
    assert.match(await alarm.innerText(), /^[24] pages did not match their tags/);
    assert.ok(await visit.page.locator("#alarm-pill").isVisible());
    await visit.page.locator("[data-counter=mismatches].bad").waitFor();
    assert.deepEqual(await visit.page.evaluate(weakTexts, 4.5), []);
    await visit.page.unrouteAll({ behavior: "wait" });
    await visit.close();
  },

  async check_a_server_that_is_gone_is_said() {
    const visit = await open();
    await visit.page.route("**/stats.json", (route) => route.abort("connectionrefused"));
    await visit.status("no connection");
    await visit.page.getByText("the server does not answer").waitFor();
    await visit.page.unrouteAll({ behavior: "wait" });
    await visit.status("ready");
    await visit.page.locator("#trouble").waitFor({ state: "hidden" });
    await visit.close("ERR_CONNECTION_REFUSED");
  },
};

async function main() {
  const [address, ...names] = process.argv.slice(2);
  url = address;
  browser = await launch();
  try {
    for (const name of names) {
      try {
        await checks[name]();
      } catch (error) {
        console.log(`failed ${name}`);
        throw error;
      }
      console.log(`ok ${name}`);
    }
  } finally {
    await browser.close();
  }
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
