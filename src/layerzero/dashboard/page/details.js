// Views of files: the conflict matrix, traces, capsules.

import { asked, filter, open, passes } from "./app.js";
import { bytes, duration, h, number, s, table } from "./draw.js";
import { facts } from "./views.js";

const date = (seconds) => seconds ? new Date(1000 * seconds).toLocaleString("en-GB") : "";
const MARKS = { ok: "✓", careful: "!", conflict: "✗" };
const ROW = 16; // of the timeline, in px
const COLOURS = 6; // that style.css has

/** What there is to say before an answer, or of one that is an error. */
function missing(answer) {
  if (!answer) return [h("p.soft", {}, "Asking …")];
  return answer.error ? [h("p.bad", { role: "alert" }, answer.error.message)] : null;
}

export function matrix(state) {
  const answer = asked("/api/matrix", 30000);
  const none = missing(answer);
  if (none) return none;
  if (!answer.matrix) {
    return [h("h2", {}, "Conflict matrix"), h("p", {}, "None was made on this machine yet. This makes one of a few backends, in minutes:"),
      h("pre", {}, "lz matrix torch mlx onnxruntime")];
  }
  const found = answer.matrix;
  const cells = new Map(found.cells.map((cell) => [[...cell.subjects].sort().join(" + "), cell]));
  const at = (a, b) => cells.get([...new Set([a, b])].sort().join(" + "));
  const names = found.subjects.map((one) => one.name);
  const chosen = cells.get(state.open);
  const kind = (cell) => cell.state === "ok" ? "ok" : cell.state === "care" ? "careful" : "conflict";
  const button = (cell, key) => h(`button.${kind(cell)}`, {
    type: "button", title: `${key}: ${cell.kind}`, "aria-label": `${key}: ${cell.kind}`, "data-key": key, click: () => open(key),
  }, MARKS[kind(cell)]);
  return [
    h("h2", {}, "Conflict matrix"),
    h("p.soft", {}, `${found.machine.made_at}, ${found.machine.cpu}. In one environment and one process: ✓ together, ! with care, ✗ not.`),
    chosen ? h("section.detail", {}, h("div.bar", {}, h("h2", {}, state.open), h("button", { type: "button", click: () => open(state.open) }, "Close")),
      h("p", {}, `${chosen.kind}: ${found.kinds[chosen.kind] ?? ""}`), h("p", {}, chosen.plain?.summary ?? ""),
      chosen.plain?.evidence ? h("pre", {}, typeof chosen.plain.evidence === "string" ? chosen.plain.evidence : JSON.stringify(chosen.plain.evidence, null, 1)) : null) : null,
    h("div.scroll.map", {}, h("table", {},
      h("thead", {}, h("tr", {}, h("td"), names.map((name) => h("th", { scope: "col" }, h("span", {}, name))))),
      h("tbody", {}, names.map((row) => h("tr", {}, h("th", { scope: "row" }, row), names.map((column) => {
        const cell = at(row, column);
        return h("td", {}, cell ? button(cell, [...new Set([row, column])].sort().join(" + ")) : null);
      })))))),
    h("h2", {}, "Fewest environments"),
    h("ol", {}, found.environments.groups.map((group) => h("li", {}, group.join(", ")))),
  ];
}

export function traces(state) {
  if (state.open) return trace(state.open);
  const answer = asked("/api/traces");
  const none = missing(answer);
  if (none) return none;
  return [
    h("div.bar", {}, h("h2", {}, "Traces"), filter("traces")),
    h("p.soft", {}, "Saved by programs to ", h("code", {}, answer.folder), ":"),
    table([["file", "name"], ["saved", "name"], ["size", "n"]], answer.traces.filter((one) => passes(one.name)).map((one) => ({
      key: one.name, open, cells: [one.name, date(one.made_s), bytes(one.bytes)],
    })), { empty: `None: with lz.trace() as trace: ... and trace.save("${answer.folder}/NAME.lztrace")` }),
  ];
}

function trace(name) {
  const answer = asked(`/api/traces/${encodeURIComponent(name)}`, Infinity);
  const back = h("div.bar", {}, h("h2", {}, name), h("button", { type: "button", click: () => open(name) }, "Close"));
  return [back, ...missing(answer) ?? [
    h("p.soft", {}, `${number(answer.count)} calls; ${Object.entries(answer.facts).map((pair) => pair.join(" ")).join(", ")}`),
    answer.calls.length ? timelineOf(answer) : null,
    answer.count > answer.calls.length ? h("p.soft", {}, `The first ${number(answer.calls.length)} calls. lz trace export has all of them for ui.perfetto.dev.`) : null,
    Object.entries(answer.tables).map(([by, text]) => [h("h3", {}, `By ${by}`), h("pre", {}, text)]),
  ]];
}

const drawn = new WeakMap(); // what is drawn of an answer stays, with the call that was pointed at

function timelineOf(answer) {
  if (!drawn.has(answer)) drawn.set(answer, timeline(answer.calls));
  return drawn.get(answer);
}

function timeline(calls) {
  const threads = [...new Set(calls.map((one) => one.thread))];
  const backends = [...new Set(calls.map((one) => one.backend))].sort();
  const colour = (one) => `c${backends.indexOf(one.backend) % COLOURS}`;
  const end = Math.max(...calls.map((one) => one.start_us + one.us), 1);
  const said = h("p.soft", { role: "status" }, "Point at a call, or go from one to the next by the arrow keys.");
  const height = threads.length * ROW * 2;
  const texts = [];
  const bars = calls.map((one) => {
    const style = one.error ? ".failed" : `.${colour(one)}${one.fell_back ? ".fell" : ""}`;
    const text = `${one.label} on ${one.backend}: ${duration(one.us)}${one.fell_back ? `, ${one.fell_back} failed attempts` : ""}${one.error ? `, ${one.error}` : ""}`;
    texts.push(text);
    return s(`rect${style}`, {
      x: one.start_us / end * 1000, width: Math.max(one.us / end * 1000, 0.6), y: threads.indexOf(one.thread) * ROW * 2 + ROW, height: ROW - 4,
      pointerenter: () => { said.textContent = text; },
    }, s("title", {}, text));
  });
  let chosen = -1;
  const go = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    bars[chosen]?.classList.remove("chosen");
    chosen = Math.min(Math.max(chosen + by, 0), bars.length - 1);
    bars[chosen].classList.add("chosen");
    bars[chosen].scrollIntoView({ block: "nearest", inline: "nearest" });
    said.textContent = texts[chosen];
  };
  return [h("div.scroll", {}, s("svg.timeline", {
    viewBox: `0 0 1000 ${height}`, role: "img", "aria-label": `${calls.length} calls in ${duration(end)}`, tabindex: 0, "data-key": "timeline", keydown: go,
  }, threads.map((one, n) => s("text", { x: 2, y: n * ROW * 2 + ROW - 4 }, `thread ${one}`)), bars)),
  h("p.keys", {}, backends.map((name) => h(`span.key.c${backends.indexOf(name) % COLOURS}`, {}, name))), said];
}

/** A fact as text: of versions "mlx 0.32, numpy 2.4". */
function worded(value) {
  if (typeof value === "string") return value;
  if (Array.isArray(value) && value.every((one) => typeof one === "string")) return value.join(", ");
  const isFlat = value && !Array.isArray(value) && Object.values(value).every((one) => typeof one !== "object");
  return isFlat ? Object.entries(value).map((pair) => pair.join(" ")).join(", ") : JSON.stringify(value);
}

export function capsules(state) {
  if (state.open) return capsule(state.open);
  const answer = asked("/api/capsules");
  const none = missing(answer);
  if (none) return none;
  return [
    h("div.bar", {}, h("h2", {}, "Capsules"), filter("capsules")),
    h("p.soft", {}, "Calls whose worker died or hung, kept so that they can be made again."),
    table([["when", "name"], ["kernel", "name"], ["ended by", "name"], ["call", "text.wide"], ["data", "name.wide"]],
      answer.capsules.filter((one) => passes(one.name, one.call, one.kernel, one.ended_by)).map((one) => ({
        key: one.name, open, cells: [date(one.made_s) || one.name, one.kernel || h("span.bad", {}, one.problem), h("span.bad", {}, one.ended_by),
          h("code", {}, one.call), one.data === "yes" ? "yes" : "shapes"],
      })), { empty: "None: no call has killed a worker." }),
  ];
}

const LAST_CALLS = "its worker's last calls";

function capsule(name) {
  const answer = asked(`/api/capsules/${encodeURIComponent(name)}`, Infinity);
  const calls = Array.isArray(answer?.facts?.[LAST_CALLS]) ? answer.facts[LAST_CALLS] : null;
  const back = h("div.bar", {}, h("h2", {}, name), h("button", { type: "button", click: () => open(name) }, "Close"));
  return [back, ...missing(answer) ?? [
    h("p", {}, h("code", {}, answer.call)),
    h("p", {}, "To make it again in every environment:"), h("pre", {}, answer.replay),
    h("p", {}, "A program for an issue of the library:"), h("pre", {}, `lz capsule script ${name}`),
    h("h3", {}, "Attempts that failed"),
    table([["kernel", "name"], ["ended by", "name"], ["", "text"]], answer.failures.map((one, n) => ({
      key: String(n), cells: [one.kernel_id, one.exit_signal !== null ? `signal ${one.exit_signal}` : one.exit_code !== null ? `exit ${one.exit_code}` : one.outcome, one.detail],
    })), { empty: "" }),
    h("h3", {}, "Facts"),
    h("dl.facts", {}, facts({ "answered by": answer.served_by || "nobody", "data": answer.left_out || "kept",
      ...Object.fromEntries(Object.entries(answer.facts).filter(([key]) => key !== LAST_CALLS || !calls).map(([key, value]) => [key, worded(value)])) })),
    calls ? [h("h3", {}, "Its worker's last calls, the newest first"), h("pre", {}, calls.toReversed().join("\n"))] : null,
    answer.log ? [h("h3", {}, "The worker's last words"), h("pre", {}, answer.log)] : null,
  ]];
}
