// Live updates: on each event, the changing part of the page is fetched again from the page's own URL. Without this
// file everything works, but a page shows the state of its loading.
"use strict";

const SOON = 250; // ms after a change, so that one fetch covers several
const SELDOM = 2000; // ms between fetches for progress
const ANYWAY = 30000; // ms between fetches without an event, for the times 'ago'
const PATIENCE = 30000; // ms until a fetch without an answer is given up

const live = () => document.getElementById("live");
const pulse = document.getElementById("pulse");
const announced = document.getElementById("announced");
let source = null;
let due = null;
let dueAt = Infinity;
let looking = false;
let lookedAt = performance.now();

function showState(state, text) {
  if (!pulse) return;
  pulse.hidden = false;
  pulse.dataset.state = state;
  document.getElementById("pulse-text").textContent = text;
}

function look(within) {
  const at = performance.now() + within;
  if (at >= dueAt) return;
  clearTimeout(due);
  dueAt = at;
  due = setTimeout(fetchPart, within);
}

async function fetchPart() {
  dueAt = Infinity;
  if (looking || document.hidden) return look(SELDOM);
  looking = true;
  lookedAt = performance.now();
  try {
    const url = new URL(location.href);
    url.searchParams.set("part", "live");
    const answer = await fetch(url, { credentials: "same-origin", redirect: "manual", signal: AbortSignal.timeout(PATIENCE) });
    if (answer.type === "opaqueredirect") return location.reload(); // signed out meanwhile
    if (!answer.ok) return showState("away", `error ${answer.status}`);
    const text = await answer.text();
    if (!leave || source?.readyState === EventSource.OPEN) showState("live", "live");
    put(text);
  } catch {
    showState("away", "reconnecting");
  } finally {
    looking = false;
  }
}

// Instants are in UTC without this file; here they are in the person's time zone, with UTC as a tooltip.
const LOCAL = { dateStyle: "short", timeStyle: "medium" }; // of Sweden, where that is as in ISO 8601
const local = new Intl.DateTimeFormat("sv-SE", LOCAL);
const zone = new Intl.DateTimeFormat("en", { timeZoneName: "short" });

function localise(element) {
  for (const one of element.querySelectorAll("time[datetime]")) {
    const at = new Date(one.dateTime);
    const name = zone.formatToParts(at).find((part) => part.type === "timeZoneName").value;
    const text = `${local.format(at)} ${name}`;
    const clock = "clock" in one.dataset;
    one.title = clock ? at.toISOString().replace("T", " ").replace(/\.\d+Z/, " UTC") : text;
    if (clock) one.textContent = text;
  }
}

function put(text) {
  const old = live();
  const fresh = new DOMParser().parseFromString(text, "text/html").getElementById("live");
  if (!fresh) return;
  if (busyIn(old)) return showState("away", "paused while you write");
  localise(fresh);
  for (const open of old.querySelectorAll("details[open][id]")) {
    const same = fresh.querySelector(`#${CSS.escape(open.id)}`);
    if (same) same.open = true;
  }
  for (const box of old.querySelectorAll("input[type=checkbox][id]")) {
    const same = fresh.querySelector(`#${CSS.escape(box.id)}`);
    if (same) same.checked = box.checked;
  }
  if (fresh.innerHTML === old.innerHTML) return;
  const at = document.activeElement;
  const path = old.contains(at) ? pathTo(at, old) : null;
  const scrolled = [...old.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  old.replaceWith(fresh);
  fresh.querySelectorAll(".scroll").forEach((one, place) => (one.scrollLeft = scrolled[place] ?? 0));
  if (path) fresh.querySelector(path)?.focus({ preventScroll: true });
  if (fresh.dataset.said && fresh.dataset.said !== old.dataset.said) announced.textContent = fresh.dataset.said;
}

// Whether a person is filling in a form or selecting text, which replacing the element would interrupt.
function busyIn(element) {
  const at = document.activeElement;
  const selected = getSelection();
  const fields = [...element.querySelectorAll("input:not([type=checkbox]), select, textarea")];
  const writing = fields.some((field) => field === at || isChanged(field));
  return writing || (selected && !selected.isCollapsed && element.contains(selected.anchorNode));
}

function isChanged(field) {
  if (field.type === "radio") return field.checked !== field.defaultChecked;
  if (field.localName !== "select") return field.value !== field.defaultValue;
  // Of a menu without a default, the browser selects the first option.
  return field.selectedIndex !== Math.max(0, [...field.options].findIndex((option) => option.defaultSelected));
}

function pathTo(element, top) {
  if (element.id) return `#${CSS.escape(element.id)}`;
  const steps = [];
  for (let at = element; at !== top; at = at.parentElement) {
    steps.unshift(`${at.localName}:nth-child(${[...at.parentElement.children].indexOf(at) + 1})`);
  }
  return `:scope > ${steps.join(" > ")}`;
}

// A browser has six connections to a host, so a hidden page leaves its own to others, and of the pages in sight three
// listen: each holds one of three locks meanwhile. The others look now and then.
let leave = null;
let again = null;
let taking = false;

async function takePlace() {
  if (!navigator.locks) return () => {};
  for (const place of [0, 1, 2]) {
    const taken = await new Promise((tell) => {
      const hold = (lock) => (lock ? new Promise((release) => tell(release)) : tell(null));
      navigator.locks.request(`tessera-events-${place}`, { ifAvailable: true }, hold);
    });
    if (taken) return taken;
  }
  return null;
}

function leavePlace() {
  source?.close();
  leave?.();
  leave = null;
}

async function listen() {
  if (taking || document.hidden || (source && source.readyState !== EventSource.CLOSED)) return;
  clearTimeout(again);
  leavePlace();
  taking = true;
  leave = await takePlace();
  taking = false;
  if (!leave || document.hidden) {
    leavePlace();
    look(SOON);
    again = setTimeout(listen, 10000);
    return;
  }
  source = new EventSource(document.body.dataset.events);
  source.addEventListener("open", () => {
    showState("live", "live");
    look(SOON); // for changes meanwhile
  });
  source.addEventListener("change", () => look(SOON));
  source.addEventListener("progress", () => look(Math.max(SOON, SELDOM - (performance.now() - lookedAt))));
  source.addEventListener("error", () => {
    showState("away", "reconnecting");
    // A refused connection is not retried by the browser.
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 10000);
  });
}

// The values under the pointer, from the table of the same chart, whose rows are at `data-places` of its width.
function showValues(event) {
  const chart = event.target.closest?.(".chart[data-places]");
  const panel = chart?.closest(".panel");
  for (const one of document.querySelectorAll(".tip, .cross")) if (!panel?.contains(one)) one.remove();
  if (!chart) return;
  const box = chart.getBoundingClientRect();
  const at = (100 * (event.clientX - box.left)) / box.width;
  const places = chart.dataset.places.split(" ").map(Number);
  const row = places.reduce((best, place, index) => (Math.abs(place - at) < Math.abs(places[best] - at) ? index : best), 0);
  const table = panel.querySelector("table");
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const rows = [...table.tBodies[0].rows];
  // By bytes and time, lines of several runs have values at different places: then it is each line's value so far.
  const before = names[0] === "version" ? [rows[row]] : rows.slice(row);
  const cells = names.map((_, index) => (before.find((one) => one.cells[index].textContent !== "–") ?? rows[row]).cells[index].textContent);
  const tip = panel.querySelector(".tip") ?? panel.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.ariaHidden = "true";
  const list = document.createElement("dl");
  names.forEach((name, index) => {
    if (cells[index] === "–") return;
    list.append(Object.assign(document.createElement("dt"), { textContent: name }));
    list.append(Object.assign(document.createElement("dd"), { textContent: cells[index] }));
  });
  tip.replaceChildren(list);
  const cross = chart.querySelector(".cross") ?? chart.appendChild(document.createElementNS(chart.namespaceURI, "line"));
  cross.setAttribute("class", "cross");
  const height = chart.getAttribute("height") - 30;
  Object.entries({ x1: `${places[row]}%`, x2: `${places[row]}%`, y1: 14, y2: height }).forEach(([name, value]) => cross.setAttribute(name, value));
  const card = panel.getBoundingClientRect();
  const left = box.left - card.left + (box.width * places[row]) / 100;
  tip.style.top = `${box.top - card.top + 10}px`;
  if (left < card.width / 2) Object.assign(tip.style, { left: `${left + 10}px`, right: "auto" });
  else Object.assign(tip.style, { left: "auto", right: `${card.width - left + 10}px` });
}
addEventListener("pointermove", showValues, { passive: true });
addEventListener("pointerdown", showValues, { passive: true });

localise(document);
// The menu of a phone scrolls.
const current = document.querySelector(".menu [aria-current]");
if (current) current.closest(".menu").scrollLeft = current.offsetLeft - innerWidth / 2;
if (document.body.dataset.events && live()) {
  showState("away", "connecting");
  listen();
  document.addEventListener("visibilitychange", () => (document.hidden ? leavePlace() : listen()));
  addEventListener("pagehide", leavePlace);
  setInterval(() => look(0), ANYWAY);
  addEventListener("pageshow", (event) => event.persisted && location.reload());
}
