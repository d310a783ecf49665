// Workers as boxes, and the links between them, with what moves over them.

import { $, bytes, counted, el, redraw, svg } from "./dom.js";
import { entriesOf } from "./way.js";

const BOX = { height: 58, gap: 10, width: 200 };
const LINK = 60;
/* Most boxes in a row; further ones are counted in the last. */
const BOXES_MAX = 3;

const isUp = (state) => /ready|up|open|connected|healthy/i.test(state);
const isFront = (role) => role !== "prefill";

class Picture {
  constructor() {
    this.rows = { router: [], front: [], prefill: [] };
    this.links = [];
  }

  add(row, box) {
    const known = this.rows[row].find((one) => one.id === box.id);
    if (known) return known;
    this.rows[row].push(box);
    return box;
  }
}

const boxOf = (worker, at, id) => ({
  id, name: worker.role + " worker", place: at, text: worker.running + " running, " + worker.queued + " queued",
});

/* Workers of one process, and the peers that they name. */
function addWorkers(picture, workers, at, moving) {
  const own = workers.map((worker, index) => {
    const row = isFront(worker.role) ? "front" : "prefill";
    return picture.add(row, boxOf(worker, at || "this process", at + "#" + index));
  });
  workers.forEach((worker, index) => {
    for (const peer of worker.peers) {
      const sibling = workers.findIndex((other, n) => n !== index && other.role !== worker.role);
      const isInside = peer.transport.replace("-", "") === "inprocess" && sibling >= 0;
      // Both workers of a process name each other: the link is drawn once.
      if (isInside && !isFront(worker.role)) continue;
      const other = isInside ? own[sibling] : picture.add(isFront(worker.role) ? "prefill" : "front", {
        id: peer.address, name: isFront(worker.role) ? "prefill worker" : "decode worker", place: peer.address, text: "another process",
      });
      const [front, prefill] = isFront(worker.role) ? [own[index], other] : [other, own[index]];
      picture.links.push({
        from: prefill.id, to: front.id, peer: peer.address, state: peer.state, transport: peer.transport,
        moving: moving(worker.role, peer), text: front.name + (at ? " " + at : "") + " ← " + prefill.name + (isInside ? "" : " " + other.place),
      });
    }
  });
}

function pictureOf(stats, numbers) {
  const picture = new Picture();
  const handing = entriesOf(stats).filter((entry) => entry.stage === "hand_off" && entry.peer);
  const moves = (at) => (role, peer) => {
    const own = handing.some((entry) => entry.at === at && entry.peer.address === peer.address);
    return own || numbers.rate("dsv4:transfer_bytes_pulled_total", { transport: peer.transport, role }) > 0
      || numbers.rate("dsv4:transfer_items_offered_total", { transport: peer.transport, role }) > 0;
  };
  if (!stats.processes) {
    addWorkers(picture, stats.workers || [], "", moves(""));
    return picture;
  }
  const router = picture.add("router", { id: "router", name: "router", place: "this process", text: counted(stats.processes.length, "worker") });
  for (const process of stats.processes) {
    const workers = process.stats?.workers || [];
    if (workers.length) addWorkers(picture, workers, process.address, moves(process.address));
    else picture.add("front", { id: process.address + "#0", name: "worker", place: process.address, text: process.status });
    // Requests go to the worker that answers them.
    const front = Math.max(0, workers.findIndex((worker) => isFront(worker.role)));
    picture.links.push({
      from: router.id, to: process.address + "#" + front, peer: process.address, state: process.status, transport: "HTTP",
      moving: process.under_way > 0, text: "router → " + process.address, note: process.reason,
    });
  }
  return picture;
}

/* Where each box stands; those that do not fit share the last place of their row. */
function layOut(picture, width) {
  const places = new Map(), boxes = [];
  let y = 1;
  for (const row of [picture.rows.router, picture.rows.front, picture.rows.prefill]) {
    if (!row.length) continue;
    const shown = row.length > BOXES_MAX ? row.slice(0, BOXES_MAX - 1) : row;
    const count = Math.min(row.length, BOXES_MAX);
    const size = Math.min(BOX.width, (width - 2 - BOX.gap * (count - 1)) / count);
    const left = (width - size * count - BOX.gap * (count - 1)) / 2;
    const at = (n) => ({ x: left + n * (size + BOX.gap), y, width: size });
    shown.forEach((box, n) => {
      boxes.push({ ...box, ...at(n) });
      places.set(box.id, at(n));
    });
    const others = row.slice(shown.length);
    if (others.length) boxes.push({ ...at(count - 1), name: others.length + " more", place: "see the list below", text: "" });
    for (const box of others) places.set(box.id, at(count - 1));
    y += BOX.height + LINK;
  }
  return { places, boxes, height: Math.max(1, y - LINK + 1) };
}

const fit = (text, width) => {
  const room = Math.floor((width - 14) / 6.2);
  return text.length > room ? "…" + text.slice(1 - room) : text;
};

function drawBox(box) {
  const line = (dy, name, text) => svg("text", { x: box.x + 8, y: box.y + dy, class: name }, fit(text, box.width));
  return svg("g", { class: "box" },
    svg("rect", { x: box.x, y: box.y, width: box.width, height: BOX.height, rx: 8 }),
    line(18, "name", box.name), line(34, "place", box.place), line(50, "text", box.text));
}

function drawLink(link, places) {
  const [from, to] = [places.get(link.from), places.get(link.to)];
  if (!from || !to) return null;
  const upper = from.y < to.y ? from : to, lower = from.y < to.y ? to : from;
  const top = { x: upper.x + upper.width / 2, y: upper.y + BOX.height }, end = { x: lower.x + lower.width / 2, y: lower.y };
  const label = link.transport + (link.moving ? " · moving" : isUp(link.state) ? "" : " · " + link.state);
  const [start, stop] = from === upper ? [top, end] : [end, top];
  return svg("g", { class: "link" + (link.moving ? " active" : "") + (isUp(link.state) ? "" : " down"), "data-peer": link.peer, "data-active": String(link.moving) },
    svg("path", { d: `M${start.x} ${start.y} L${stop.x} ${stop.y}` }),
    svg("text", { x: (top.x + end.x) / 2, y: (top.y + end.y) / 2 + 4, "text-anchor": "middle" }, label));
}

function linkLine(link) {
  const state = link.moving ? (link.transport === "HTTP" ? "requests under way" : "pages moving") : link.state;
  return el("li", { "data-moving": String(link.moving) },
    el("span", { class: isUp(link.state) ? "good" : "bad", "aria-hidden": "true", text: isUp(link.state) ? "● " : "○ " }),
    link.text + " over " + link.transport + ": ", el("b", { text: state }), link.note ? " (" + link.note + ")" : null);
}

export function showTopology(stats, numbers) {
  const picture = pictureOf(stats, numbers);
  const width = Math.max(280, $("topology").clientWidth || 360);
  redraw($("topology"), { ...picture, width }, () => {
    const { places, boxes, height } = layOut(picture, width);
    return [svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-labelledby": "topology-title", "aria-describedby": "links" },
      ...picture.links.map((link) => drawLink(link, places)), ...boxes.map(drawBox))];
  });
  const rate = numbers.rate("dsv4:transfer_bytes_pulled_total");
  const isAlone = (stats.workers || []).every((worker) => worker.role === "unified");
  const none = isAlone && !stats.processes ? "No links: prompts are computed here." : "Nobody is connected.";
  const shown = { links: picture.links, none, rate: rate ? bytes(rate) + "/s of pages" : "" };
  redraw($("links"), shown, () => [
    ...picture.links.map(linkLine),
    shown.rate && el("li", { class: "numbers", text: shown.rate }),
    picture.links.length === 0 && el("li", { text: none }),
  ]);
}
