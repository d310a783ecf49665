// A browser at the page: opens it, watches for errors and foreign requests, asks about what it shows.

"use strict";

const assert = require("node:assert/strict");
const { chromium } = require("playwright-core");

/* Longest wait for anything; reaching it is a failure, not a measurement. */
const PATIENCE = 120000;
const ARGUMENTS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
];
const DESKTOP = { width: 1280, height: 800 };
const PHONE = { width: 390, height: 844 };

const launch = () =>
  chromium.launch({ executablePath: process.env.DSV4_TEST_BROWSER, args: ARGUMENTS, timeout: PATIENCE });

/* One tab with its own storage, and what went wrong in it. */
class Visit {
  constructor(url, page) {
    this.url = url;
    this.page = page;
    this.complaints = [];
    page.setDefaultTimeout(PATIENCE);
    page.on("console", (message) => {
      if (["error", "warning"].includes(message.type())) this.complaints.push("console: " + message.text());
    });
    page.on("pageerror", (error) => this.complaints.push("page: " + error));
    page.on("request", (request) => {
      if (new URL(request.url()).origin !== url) this.complaints.push("foreign: " + request.url());
    });
    page.on("dialog", (dialog) => {
      this.complaints.push("dialog: " + dialog.message());
      dialog.dismiss();
    });
  }

  static async open(browser, url, { isReady = true, ...options } = {}) {
    const context = await browser.newContext({ viewport: DESKTOP, ...options });
    const visit = new Visit(url, await context.newPage());
    visit.response = await visit.page.goto(url + "/");
    if (isReady) await visit.status("ready");
    return visit;
  }

  /* Closes the tab; what it complained about must be what was expected, and that must have come. */
  async close(...expected) {
    await this.page.context().close();
    const rest = this.complaints.filter((line) => !expected.some((part) => line.includes(part)));
    assert.deepEqual(rest, []);
    for (const part of expected) assert.ok(this.complaints.some((line) => line.includes(part)), "no " + part);
  }

  /* Waits until the status says so. */
  status(text) {
    return this.page.locator("#status", { hasText: text }).waitFor();
  }

  /* Sends a message as a person does; gives the answer's turn. */
  async send(text) {
    const turns = this.page.locator(".turn.assistant");
    const before = await turns.count();
    await this.page.getByLabel("Message", { exact: true }).fill(text);
    await this.page.keyboard.press("Enter");
    const turn = turns.nth(before);
    await turn.waitFor();
    return turn;
  }

  /* Waits for the end of an answer; gives its text. */
  async answered(turn) {
    await turn.page().waitForFunction((node) => !node.hasAttribute("aria-busy"), await turn.elementHandle());
    const text = turn.locator("> .text");
    return (await text.count()) ? text.innerText() : "";
  }

  async ask(text) {
    return this.answered(await this.send(text));
  }

  /* A number that the page shows among its counters. */
  async counter(name) {
    const node = this.page.locator(`[data-counter=${name}]`);
    return Number(await node.getAttribute("data-value"));
  }

  async setThinking(yes) {
    await this.settings();
    await this.page.getByLabel("Think first").setChecked(yes);
  }

  async settings() {
    if (!(await this.page.locator("#settings").getAttribute("open") !== null)) await this.page.locator("#settings > summary").click();
  }

  /* The page as a picture, where pictures are wanted. */
  async picture(name) {
    const folder = process.env.DSV4_PAGE_PICTURES;
    if (folder) await this.page.screenshot({ path: `${folder}/${name}.png`, animations: "disabled" });
  }
}

/* In the page: texts whose contrast with what is behind them is below `least`. Runs in the browser. */
function weakTexts(least) {
  const numbers = (color) => color.match(/[\d.]+/g).map(Number);
  const luminance = (rgb) => {
    const part = (value) => {
      const share = value / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    };
    return 0.2126 * part(rgb[0]) + 0.7152 * part(rgb[1]) + 0.0722 * part(rgb[2]);
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = numbers(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] > 0.99) return found;
    }
    return [255, 255, 255];
  };
  const weak = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const style = getComputedStyle(node);
    // In pictures a text lies on a box, whose colour is that of a card, or on the page.
    const box = node.closest("svg .box")?.querySelector("rect");
    const ground = box ? numbers(getComputedStyle(box).fill) : behind(node);
    const ink = numbers(node.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const [high, low] = [luminance(ink), luminance(ground)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < least) weak.push(`${ratio.toFixed(2)} ${text.data.trim().slice(0, 40)}`);
  }
  return weak;
}

/* In the page: what a screen reader would stumble over. Runs in the browser. */
function unnamedThings() {
  const wrong = [];
  const shown = (node) => node.outerHTML.slice(0, 90);
  const textOf = (ids) => ids.split(" ").map((id) => document.getElementById(id)?.textContent || "").join("").trim();
  const nameOf = (node) => {
    if (node.getAttribute("aria-labelledby")) return textOf(node.getAttribute("aria-labelledby"));
    if (node.getAttribute("aria-label")) return node.getAttribute("aria-label");
    if (node.labels?.length) return node.labels[0].textContent.trim();
    return ["BUTTON", "A", "SUMMARY"].includes(node.tagName) ? node.textContent.trim() : "";
  };
  const needName = "input, textarea, select, button:not([hidden]), a, summary, progress, section, [role=img], [role=log], [role=group], [tabindex='0']";
  for (const node of document.querySelectorAll(needName)) {
    if (node.classList.contains("card")) continue;
    if (!nameOf(node)) wrong.push("no name: " + shown(node));
  }
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) wrong.push("twice: " + id);
  if (!document.documentElement.lang) wrong.push("no language");
  if (document.querySelectorAll("h1").length !== 1) wrong.push("not one h1");
  let level = 1;
  for (const heading of document.querySelectorAll("h1, h2, h3, h4")) {
    const next = Number(heading.tagName[1]);
    if (next > level + 1) wrong.push("a level left out: " + shown(heading));
    level = next;
  }
  for (const landmark of ["header", "main"]) {
    if (document.querySelectorAll(landmark).length !== 1) wrong.push("not one " + landmark);
  }
  for (const node of document.querySelectorAll("svg")) {
    if (node.getAttribute("role") !== "img") wrong.push("a picture without role: " + shown(node));
  }
  for (const [selector, what] of [["#log[role=log][aria-live]", "conversation"], ["#status[role=status]", "status"],
    ["#alarm[role=alert]", "alarm"], ["#said[role=status]", "news of the answer"], ["#key-why[role=alert]", "key"]]) {
    if (!document.querySelector(selector)) wrong.push("not live: " + what);
  }
  return wrong;
}

module.exports = { DESKTOP, PHONE, PATIENCE, Visit, launch, unnamedThings, weakTexts };
