// The page: what is shown, what was seen, the stream, and the keys.

import { h } from "./draw.js";
import { VIEWS } from "./views.js";

const SPANS = [[900, "15 min"], [3600, "1 h"], [86400, "1 d"], [30 * 86400, "30 d"]];
const LIVE_S = 900; // charts of up to so long go on with the stream; others are asked for again
const AGAIN_MS = 10000, ANEW_MS = 5000;

export const state = {
  view: "overview", now: null, error: null, at: 0, events: [], points: [], span: 900, filter: "", open: null,
  site: { may_act: false }, answers: new Map(), isPaused: false, isLinked: false, isHeld: false,
};
const $ = (id) => document.getElementById(id);

/** The answer to a question of the page, from the last time; asked anew when it is older than `maxAge` ms, errors sooner. */
export function asked(path, maxAge = ANEW_MS) {
  const found = state.answers.get(path) ?? { at: -Infinity, value: null, isAsked: false };
  const kept = found.value?.error ? Math.min(maxAge, ANEW_MS) : maxAge;
  if (!found.isAsked && (found.value === null || performance.now() - found.at > kept)) {
    state.answers.set(path, { ...found, isAsked: true });
    fetch(path).then((answer) => answer.json()).catch((why) => ({ error: { message: `${path} has no answer: ${why.message}` } })).then((value) => {
      state.answers.set(path, { at: performance.now(), value, isAsked: false });
      render();
    });
  }
  return found.value;
}

/** Have the broker do something. */
export async function act(action, backend) {
  const answer = await fetch(`/api/${action}/${encodeURIComponent(backend)}`, { method: "POST", headers: { "X-LayerZero": "1" } });
  const value = await answer.json().catch(() => ({ error: { message: answer.statusText } }));
  state.said = { backend, text: value.error ? value.error.message : `${action}: asked for` };
  render();
}

export function open(key) {
  state.open = state.open === key ? null : key;
  location.replace(`#${state.view}${state.open === null ? "" : `/${encodeURIComponent(state.open)}`}`);
  render();
}

export function spans() {
  return h("select", { "aria-label": "Time shown", change: (event) => show(Number(event.target.value)) },
    SPANS.map(([seconds, text]) => h("option", { value: seconds, selected: seconds === state.span }, text)));
}

export function filter(what) {
  return h("input", {
    id: "filter", type: "search", placeholder: `filter ${what} (/)`, value: state.filter, "aria-label": `Filter ${what}`,
    input: (event) => { state.filter = event.target.value; render(); },
  });
}

export const passes = (...texts) => texts.join(" ").toLowerCase().includes(state.filter.toLowerCase());

function show(span) {
  state.span = span;
  load();
}

function load() {
  const span = state.span;
  fetch(`/api/history?seconds=${span}`).then((answer) => answer.json()).then((value) => {
    if (span === state.span && value.points) {
      state.points = value.points;
      render();
    }
  }, () => {});
}

let isDue = false;
export function render() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(draw);
}

function draw() {
  isDue = false;
  const link = $("link");
  const text = state.isPaused ? "paused" : !state.isLinked ? "no link" : state.error ? "no broker" : "live";
  link.textContent = text;
  link.className = `pill ${{ live: "good", paused: "care" }[text] ?? "bad"}`;
  const trouble = $("trouble");
  trouble.hidden = !(state.error || (!state.isLinked && state.at));
  trouble.textContent = !state.isLinked ? "lz dashboard has ended, or cannot be reached: what is shown is old."
    : state.error ? `${state.error.message}${state.error.repair ? `. To repair it: ${state.error.repair}` : ""}` : "";
  const main = $("main");
  const selection = getSelection();
  const isCopied = !selection.isCollapsed && main.contains(selection.anchorNode);
  const focus = main.contains(document.activeElement) ? document.activeElement : null;
  if (!state.isFresh && (isCopied || state.isHeld || isOpen(focus))) return;
  state.isFresh = false;
  const [key, id, tag, said] = [focus?.dataset?.key, focus?.id, focus?.tagName, focus?.textContent];
  const order = focus ? [...main.querySelectorAll(tag)].indexOf(focus) : -1;
  const caret = id === "filter" ? focus.selectionStart : null;
  const scrolls = [...main.querySelectorAll(".scroll, pre")].map((one) => [one.scrollLeft, one.scrollTop]);
  main.replaceChildren(...VIEWS.find((one) => one.name === state.view).draw(state).flat(2).filter(Boolean));
  main.querySelectorAll(".scroll, pre").forEach((one, n) => {
    if (scrolls[n]) [one.scrollLeft, one.scrollTop] = scrolls[n];
  });
  if (id) $(id)?.focus();
  else if (key) main.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
  else if (focus) [main.querySelectorAll(tag)[order]].find((one) => one?.textContent === said)?.focus({ preventScroll: true });
  if (caret !== null) $("filter")?.setSelectionRange(caret, caret);
  document.querySelectorAll("#views a").forEach((one) => {
    if (one.dataset.view !== state.view) one.removeAttribute("aria-current");
    else if (!one.hasAttribute("aria-current")) {
      one.setAttribute("aria-current", "page");
      showCurrent();
    }
  });
}

/** Of the views' names, which are wider than a narrow window. */
function showCurrent() {
  document.querySelector("#views a[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
}
window.addEventListener("resize", showCurrent);

/** Whether it is a list that somebody chooses from just now. */
function isOpen(focus) {
  if (focus?.tagName !== "SELECT") return false;
  return CSS.supports("selector(:open)") ? focus.matches(":open") : true;
}

/** What is pressed stays until it is let go: it would get no click otherwise. */
function hold(isHeld) {
  state.isHeld = isHeld;
  if (!isHeld) render();
}

function decoded(key) {
  try {
    return decodeURIComponent(key);
  } catch {
    return key; // an address that somebody has written
  }
}

function follow() {
  const [name, key] = location.hash.slice(1).split("/");
  const view = VIEWS.find((one) => one.name === name) ?? VIEWS[0];
  if (view.name !== state.view) {
    state.filter = "";
    scrollTo(0, 0);
  }
  state.view = view.name;
  state.open = key ? decoded(key) : null;
  state.isFresh = true;
  document.title = `${view.title} · LayerZero`;
  document.querySelector(`#views a[data-view="${view.name}"]`)?.scrollIntoView({ block: "nearest", inline: "nearest" });
  render();
}

function listen() {
  const source = new EventSource("/events");
  source.onopen = () => { state.isLinked = true; load(); render(); };
  source.onerror = () => { state.isLinked = false; render(); };
  source.onmessage = (message) => {
    if (state.isPaused) return;
    const frame = JSON.parse(message.data);
    state.error = frame.error;
    state.events = frame.events ?? [];
    if (frame.at) state.at = frame.at;
    if (frame.now) state.now = frame.now;
    else if (frame.error && state.now) state.now = { ...state.now, calls: [], isOld: true };
    if (frame.point && state.span <= LIVE_S) {
      state.points.push(frame.point);
      while (state.points.length && state.points[0][0] < state.at - state.span) state.points.shift();
    }
    render();
  };
  setInterval(() => { if (!state.isPaused && state.span > LIVE_S) load(); }, AGAIN_MS);
}

const shownViews = () => VIEWS.filter((one) => one.isShown?.(state.site) ?? true);

function links() {
  $("views").replaceChildren(...shownViews().map((one, n) => h("a", { href: `#${one.name}`, "data-view": one.name, title: `key ${n + 1}` }, one.title)));
}

function theme() {
  const order = ["", "dark", "light"];
  const next = order[(order.indexOf(document.documentElement.dataset.theme ?? "") + 1) % 3];
  if (next) document.documentElement.dataset.theme = next;
  else delete document.documentElement.dataset.theme;
  localStorage.setItem("theme", next);
}

function pause() {
  state.isPaused = !state.isPaused;
  $("pause").textContent = state.isPaused ? "Go on" : "Pause";
  render();
}

function step(by) {
  const rows = [...document.querySelectorAll("main tr[tabindex]")];
  const at = rows.indexOf(document.activeElement);
  rows[Math.min(Math.max(at + by, 0), rows.length - 1)]?.focus();
}

const KEYS = {
  j: () => step(1), k: () => step(-1), p: pause, t: theme, "?": () => $("help").showModal(),
  "/": () => $("filter")?.focus(),
  r: () => show(SPANS[(SPANS.findIndex(([seconds]) => seconds === state.span) + 1) % SPANS.length][0]),
  Escape: () => { if (state.open !== null) open(state.open); },
};

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  if (event.target.matches("input, select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const view = shownViews()[Number(event.key) - 1];
  if (view) location.hash = view.name;
  else if (KEYS[event.key]) KEYS[event.key]();
  else return;
  event.preventDefault();
});

const saved = localStorage.getItem("theme");
if (saved) document.documentElement.dataset.theme = saved;
links();
$("theme").addEventListener("click", theme);
$("pause").addEventListener("click", pause);
$("keys").addEventListener("click", () => $("help").showModal());
addEventListener("pointerdown", () => hold(true));
["pointerup", "pointercancel", "blur"].forEach((name) => addEventListener(name, () => hold(false)));
addEventListener("hashchange", follow);
fetch("/api/site").then((answer) => answer.json()).then((site) => { state.site = site; links(); render(); }, () => {});
listen();
follow();
