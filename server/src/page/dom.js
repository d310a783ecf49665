// What all parts of the page use: elements, numbers as text, redrawing only what changed.

export const $ = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (typeof value === "function") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/* An element with attributes; `text` is its text, functions are what it calls. */
export const el = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const drawn = new WeakMap();

/* Gives a node new children if what they show is new: what is unchanged keeps focus and selection. */
export function redraw(node, shown, build) {
  const key = JSON.stringify(shown);
  if (drawn.get(node) === key) return;
  drawn.set(node, key);
  node.replaceChildren(...build(shown).filter(Boolean));
}

/* Sets a text if it is another one, so that a live region speaks only then. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function short(value) {
  if (!Number.isFinite(value)) return "-";
  for (const [size, unit, divisor] of [[1e12, "T", 1e12], [1e9, "G", 1e9], [1e6, "M", 1e6], [1e4, "k", 1e3]]) {
    if (Math.abs(value) >= size) return (value / divisor).toFixed(1) + " " + unit;
  }
  return Number.isInteger(value) ? String(value) : value.toFixed(2);
}

/* A whole number with its thousands apart, in the same way everywhere. */
export const grouped = (number) => String(Math.round(number)).replace(/\B(?=(\d{3})+$)/g, ",");

export const counted = (number, one, many = one + "s") =>
  grouped(number) + " " + (number === 1 ? one : many);

export function bytes(count) {
  if (count >= 10 * 2 ** 30) return Math.round(count / 2 ** 30) + " GiB";
  if (count >= 2 ** 20 || count === 0) return Math.round(count / 2 ** 20) + " MiB";
  return Math.ceil(count / 2 ** 10) + " KiB";
}

export function duration(ms) {
  if (ms < 1) return ms === 0 ? "0 ms" : ms.toFixed(2) + " ms";
  if (ms < 10) return (Math.round(ms * 10) / 10) + " ms";
  if (ms < 1000) return Math.round(ms) + " ms";
  if (ms < 60000) return (ms / 1000).toFixed(1) + " s";
  return Math.floor(ms / 60000) + " min " + Math.round(ms % 60000 / 1000) + " s";
}
