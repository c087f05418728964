// The views: each draws itself from what is known.

import { act, asked, filter, open, passes, spans } from "./app.js";
import { capsules, matrix, traces } from "./details.js";
import { nodes } from "./nodes.js";
import { ago, bytes, chart, clock, duration, h, number, table } from "./draw.js";

export const VIEWS = [
  { name: "overview", title: "Overview", draw: overview },
  { name: "backends", title: "Backends", draw: backends },
  { name: "calls", title: "Calls", draw: calls },
  { name: "decisions", title: "Decisions", draw: decisions },
  { name: "environments", title: "Environments", draw: environments },
  { name: "matrix", title: "Matrix", draw: matrix },
  { name: "traces", title: "Traces", draw: traces },
  { name: "capsules", title: "Capsules", draw: capsules },
  { name: "nodes", title: "Nodes", draw: nodes, isShown: (site) => site.has_nodes },
];
const [AT, , RATE, P50, P99, FALLBACKS, ERRORS, RESTARTS, WAITING, MEMORY] = Array(10).keys();
const GOOD = ["ready", "busy"], BUSY = ["starting", "probing", "draining"];
const ELSEWHERE = ["NOT_FOR_MACHINE", "NOT_RUN"];

const waiting = () => [h("p.soft", {}, "Nothing is known yet of a broker.")];

export function dot(text) {
  const style = GOOD.includes(text) ? "good" : BUSY.includes(text) || text === "backoff" ? "care"
    : ["idle", "elsewhere", "not run", "ok", ""].includes(text) ? "soft" : "bad";
  return h(`span.state.${style}`, {}, text);
}

/** A worker's memory, and what it holds of GPUs'. */
function memoryOf(row) {
  return row.gpu_bytes ? `${bytes(row.memory_bytes)} + ${bytes(row.gpu_bytes)} GPU` : bytes(row.memory_bytes);
}

/** What `lz status` calls the state. */
export function stateOf(row) {
  if (row.state !== "absent") return row.state;
  if (!row.unavailable) return "idle";
  return { NOT_FOR_MACHINE: "elsewhere", NOT_RUN: "not run", NOT_INSTALLED: "not built", NOT_JOINED: "not joined", LIFTED_ONLY: "imported" }[row.unavailable.code] ?? "unusable";
}

function card(value, text, style = "") {
  return h("div.card", {}, h(`b${style ? `.${style}` : ""}`, {}, value), h("span", {}, text));
}

function charts(state, wanted) {
  const how = { end: state.at || Date.now() / 1000, span: state.span };
  const all = {
    rate: () => chart("Calls a second", state.points, [{ column: RATE, name: "calls", kind: "area" }], how),
    times: () => chart("How long calls took", state.points,
      [{ column: P50, name: "p50", kind: "line" }, { column: P99, name: "p99", kind: "line" }], { ...how, text: duration, logarithmic: true }),
    faults: () => chart("Fallbacks and errors", state.points,
      [{ column: FALLBACKS, name: "fallbacks", kind: "bars" }, { column: ERRORS, name: "errors", kind: "bars" }], how),
    restarts: () => chart("Restarts of workers", state.points, [{ column: RESTARTS, name: "restarts", kind: "bars" }], how),
    waiting: () => chart("Calls that wait", state.points, [{ column: WAITING, name: "waiting", kind: "area" }], how),
    memory: () => chart("Memory of workers", state.points, [{ column: MEMORY, name: "resident", kind: "area" }], { ...how, text: bytes }),
  };
  return h("div.charts", {}, wanted.map((name) => all[name]()));
}

function overview(state) {
  const { now } = state;
  if (!now) return [...waiting(), charts(state, ["rate", "times"]), log(state)];
  const last = state.points[state.points.length - 1];
  const live = last && state.at - last[AT] < 5 && !now.isOld ? last : null;
  const usable = now.backends.filter((row) => !row.unavailable);
  const running = now.backends.filter((row) => GOOD.includes(row.state));
  const total = now.totals.reduce((sum, row) => sum + row.calls, 0);
  const count = (rows) => rows.reduce((sum, row) => sum + row.count, 0);
  return [
    h("div.cards", {},
      card(live ? number(live[RATE], 0) : "–", "calls a second"),
      card(live ? duration(live[P50]) : "–", "half took at most"),
      card(live ? duration(live[P99]) : "–", "99 % took at most"),
      card(number(total), "calls that ended well"),
      card(number(count(now.fallbacks)), "fallbacks", count(now.fallbacks) ? "care" : ""),
      card(number(count(now.errors)), "errors", count(now.errors) ? "bad" : ""),
      card(`${running.length} of ${usable.length}`, "backends that run"),
      card(number(now.clients), "clients")),
    h("div.bar", {}, h("h2", {}, "What was seen"), spans()),
    charts(state, ["rate", "times", "faults", "restarts"]),
    now.problems.length ? [h("h2", {}, "Problems"), h("ul", {}, now.problems.map((text) => h("li.bad", {}, text)))] : null,
    h("h2", {}, "Workers"),
    table([["backend", "name"], ["state", "name"], ["calls a second", "n"], ["memory", "n"], ["running", "n wide"], ["waiting", "n"]]
      .map(([head, style]) => [head, style.replace(" ", ".")]),
    now.backends.filter((row) => row.pid || row.state !== "absent" && !ELSEWHERE.includes(row.unavailable?.code)).map((row) => ({
      key: row.name, open: (key) => { location.hash = `backends/${encodeURIComponent(key)}`; },
      cells: [row.name, dot(stateOf(row)), number(now.isOld ? 0 : row.rate), memoryOf(row), row.running, row.waiting],
    })), { empty: "None runs: the first call starts one." }),
    h("h2", {}, "The broker"),
    h("dl.facts", {}, facts({
      pid: now.broker.pid, up: ago(now.broker.up_s), version: `${now.broker.package}, protocol ${now.broker.protocol}`,
      devices: now.devices.map((one) => one.name || one.type).join(", "), "memory lent": bytes(now.lent_bytes),
      folder: now.broker.runtime_dir, store: now.broker.store,
    })),
    log(state),
  ];
}

export function facts(values) {
  return Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined)
    .map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]);
}

function log(state) {
  const bad = /failed|disabled|exited|unusable|dropped|refused|unreachable|lost/;
  return [h("h2", {}, "What the broker noted"),
    table([["time", "name"], ["what", "name"], ["", "text"]], state.events.slice(-15).reverse().map((one, n) => ({
      key: `${one.time}-${n}`,
      cells: [one.time ? clock(one.time) : "", h(`span${bad.test(one.event) ? ".bad" : ""}`, {}, one.event),
        Object.entries(one.facts).filter(([, text]) => text && text !== "null").map(([name, text]) => `${name} ${text}`).join(" · ")],
    })), { empty: "Nothing yet." })];
}

function backends(state) {
  const { now } = state;
  if (!now) return waiting();
  const rows = now.backends.filter((row) => passes(row.name, stateOf(row), row.summary ?? "", row.ops.join(" ")));
  const here = rows.filter((row) => !ELSEWHERE.includes(row.unavailable?.code));
  const elsewhere = rows.filter((row) => !here.includes(row));
  const found = now.backends.find((row) => row.name === state.open);
  const columns = [["backend", "name"], ["state", "name"], ["calls/s", "n"], ["answered", "n"], ["failed", "n"], ["restarts", "n"],
    ["pid", "n.wide"], ["memory", "n"], ["versions", "text.wide"]];
  return [
    h("div.bar", {}, h("h2", {}, "Backends"), filter("backends"), spans()),
    found ? backend(state, found) : null,
    charts(state, ["memory", "restarts"]),
    h("h2", {}, "Of this machine"),
    table(columns, here.map((row) => ({
      key: row.name, open,
      cells: [row.name, dot(stateOf(row)), number(now.isOld ? 0 : row.rate), number(row.answered),
        h(row.failed ? "span.bad" : "span", {}, number(row.failed)), h(row.restarts ? "span.care" : "span", {}, row.restarts), row.pid ?? "",
        memoryOf(row), Object.entries(row.versions).map(([name, version]) => `${name} ${version}`).join(", ")],
    })), { empty: "None.", selected: state.open }),
    elsewhere.length ? [h("h2", {}, "Not for this machine"), table([["backend", "name"], ["why", "text"]],
      elsewhere.map((row) => ({ key: row.name, open, cells: [row.name, row.unavailable.detail] })), { empty: "" })] : null,
  ];
}

function backend(state, row) {
  const why = row.unavailable;
  const fallbacks = state.now.fallbacks.filter((one) => one.backend === row.name);
  return h("section.detail", { "aria-label": row.name },
    h("div.bar", {}, h("h2", {}, row.name), dot(stateOf(row)),
      state.site.may_act ? ["restart", "reset"].map((action) =>
        h("button", { type: "button", click: () => act(action, row.name), title: action === "restart" ? "Another worker takes over" : "Forget its failures" }, action)) : null,
      h("button", { type: "button", click: () => open(row.name) }, "Close")),
    state.said?.backend === row.name ? h("p.care", { role: "status" }, state.said.text) : null,
    h("p", {}, row.summary ?? ""),
    why ? h("p.bad", {}, why.detail) : null,
    why?.repair ? h("pre", {}, why.repair) : null,
    row.cause ? h("p.care", {}, `Last failure: ${row.cause}`) : null,
    row.beside?.map((one) => h("p.care", {}, `Beside it: ${one.state}, pid ${one.pid ?? "none"}, ${one.running} calls`)),
    h("dl.facts", {}, facts({
      environment: row.env, versions: Object.entries(row.versions).map(([name, version]) => `${name} ${version}`).join(", "),
      "now": `${row.running} running, ${row.waiting} waiting, ${row.enqueued} on a GPU`,
      "tried again": row.retry_in_s === null ? "" : `in ${row.retry_in_s} s`, ops: row.ops.join(", "),
    })),
    fallbacks.length ? [h("h3", {}, "What failed here"), table([["op", "name"], ["why", "name"], ["calls", "n"]],
      fallbacks.map((one) => ({ key: `${one.op} ${one.code}`, cells: [one.op, one.code, number(one.count)] })), { empty: "" })] : null);
}

function calls(state) {
  const { now } = state;
  if (!now) return waiting();
  const live = new Map(now.calls.map(([op, name, path, rate, p50, p99]) => [`${op} ${name} ${path}`, { rate, p50, p99 }]));
  const rows = now.totals.filter((row) => passes(row.op, row.backend, row.path))
    .map((row) => ({ ...row, ...live.get(`${row.op} ${row.backend} ${row.path}`) }))
    .sort((a, b) => (b.rate ?? 0) - (a.rate ?? 0) || b.calls - a.calls);
  const faults = (list) => list.filter((row) => passes(row.op, row.backend, row.code)).sort((a, b) => b.count - a.count)
    .map((row) => ({ key: `${row.op} ${row.backend} ${row.code}`, cells: [row.op, row.backend, row.code, number(row.count)] }));
  const columns = [["op", "name"], ["backend", "name"], ["reason", "name"], ["count", "n"]];
  return [
    h("div.bar", {}, h("h2", {}, "Calls"), filter("calls"), spans()),
    charts(state, ["rate", "times", "faults", "waiting"]),
    h("h2", {}, "By op, backend and path"),
    table([["op", "name"], ["backend", "name"], ["path", "name.wide"], ["calls/s", "n"], ["p50", "n"], ["p99", "n"], ["mean, all", "n.wide"], ["all", "n"]],
      rows.map((row) => ({
        key: `${row.op} ${row.backend} ${row.path}`,
        cells: [row.op, row.backend, row.path, number(row.rate ?? 0, 1), duration(row.p50), duration(row.p99), duration(row.mean_us), number(row.calls)],
      })), { empty: "No call has ended well yet." }),
    h("h2", {}, "Fallbacks: attempts that failed, by reason"),
    table(columns, faults(now.fallbacks), { empty: "None." }),
    h("h2", {}, "Errors: calls that failed"),
    table(columns, faults(now.errors), { empty: "None." }),
  ];
}

function decisions(state) {
  const answer = asked("/api/decisions");
  if (!answer) return waiting();
  if (answer.error) return [h("p.bad", {}, answer.error.message)];
  const rows = answer.decisions.map((one, n) => ({ ...one, key: String(n), best: one.candidates.find((c) => c.accepted) }))
    .filter((one) => passes(one.call, one.best?.kernel_id ?? ""));
  const keyOf = (one) => one.call;
  const found = rows.find((one) => keyOf(one) === state.open);
  return [
    h("div.bar", {}, h("h2", {}, "Decisions"), filter("calls")),
    h("p.soft", {}, `Of ${number(answer.known)} kinds of calls in use, the newest first. Choose one to see why, and what would change it.`),
    found ? decision(found) : null,
    table([["call", "text"], ["kernel", "name"], ["measured", "n"], ["others", "n.wide"], ["refused", "n.wide"]], rows.map((one) => ({
      key: keyOf(one), open,
      cells: [h("code", {}, one.call), one.best?.kernel_id ?? h("span.bad", {}, "none"), duration(one.best?.measured_us),
        one.candidates.filter((c) => c.accepted).length - (one.best ? 1 : 0), one.candidates.filter((c) => !c.accepted).length],
    })), { empty: "No client has calls in use now.", selected: state.open }),
  ];
}

function decision(one) {
  const accepted = one.candidates.filter((c) => c.accepted), refused = one.candidates.filter((c) => !c.accepted);
  const [best, next] = accepted;
  return h("section.detail", { "aria-label": one.call },
    h("div.bar", {}, h("h2", {}, h("code", {}, one.call)), h("button", { type: "button", click: () => open(one.call) }, "Close")),
    h("p", {}, !best ? "No kernel may serve it." : !next ? `${best.kernel_id} is the only one that may serve it.`
      : best.group !== next.group ? `${best.kernel_id} stands before the others: ${terms(best)}.`
        : `${best.kernel_id} has ${number(best.score - next.score, 1)} points more than ${next.kernel_id}: ${difference(best, next)}.`),
    h("h3", {}, "May serve it, best first"),
    table([["kernel", "name"], ["points", "n"], ["measured", "n"], ["of what", "text"]], accepted.map((c) => ({
      key: c.kernel_id, cells: [c.kernel_id, number(c.score, 1), duration(c.measured_us),
        [terms(c), ...c.transforms.map((text) => `needs ${text}`), ...c.notes].filter(Boolean).join("; ")],
    })), { empty: "None." }),
    refused.length ? [h("h3", {}, "Refused, and what would change that"),
      table([["kernel", "name"], ["why", "text"], ["it would serve", "text"]], refused.map((c) => ({
        key: c.kernel_id, cells: [c.kernel_id, h("ul", {}, c.reasons.map((r) => h("li", {}, r.detail || r.code))),
          c.fix ? `${c.fix}${c.fix_saves_us > 0 ? `, and save ${duration(c.fix_saves_us)}` : ""}` : c.reasons.map((r) => r.repair).filter(Boolean).join("; ")],
      })), { empty: "" })] : null);
}

const terms = (c) => Object.entries(c.terms).filter(([, value]) => value).map(([name, value]) => `${name} ${number(value, 1)}`).join(", ");

function difference(best, next) {
  const names = new Set([...Object.keys(best.terms), ...Object.keys(next.terms)]);
  const found = [...names].map((name) => [name, (best.terms[name] ?? 0) - (next.terms[name] ?? 0)]).filter(([, value]) => Math.abs(value) > 0.05);
  found.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
  return found.map(([name, value]) => `${name} ${value > 0 ? "+" : ""}${number(value, 1)}`).join(", ") || "they are equal, and the order of names decides";
}

function environments(state) {
  const { now } = state;
  if (!now) return waiting();
  const rows = now.backends.filter((row) => passes(row.name, row.env ?? "", Object.keys(row.versions).join(" ")));
  return [
    h("div.bar", {}, h("h2", {}, "Environments"), filter("environments")),
    h("p.soft", {}, "One for each backend, by its lock. Versions are those that its last probe has seen; lz env build, lz doctor."),
    table([["backend", "name"], ["", "name"], ["versions", "text"], ["environment", "text.wide"]], rows.map((row) => ({
      key: row.name, open: (key) => { location.hash = `backends/${encodeURIComponent(key)}`; },
      cells: [row.name, row.built ? h("span.good", {}, "built") : row.joined ? "joined" : row.on_host ? "this Python" : h("span.soft", {}, "not built"),
        Object.entries(row.versions).map(([name, version]) => `${name} ${version}`).join(", "), h("code", {}, row.env ?? row.error ?? "")],
    })), { empty: "None." }),
  ];
}
