// The view of a cluster's nodes: each as it was seen last.

import { asked, filter, open, passes } from "./app.js";
import { ago, h, number, table } from "./draw.js";
import { dot, facts, stateOf } from "./views.js";

const EVERY_MS = 1000;

export function nodes(state) {
  if (!state.site.has_nodes) return [h("p.soft", {}, "lz dashboard --cluster shows the nodes of a Ray cluster.")];
  const answer = asked("/api/nodes", EVERY_MS);
  if (!answer) return [h("p.soft", {}, "Asking.")];
  if (answer.error) return [h("p.bad", {}, answer.error.message)];
  const rows = answer.nodes.filter((one) => passes(one.node, one.facts.host ?? one.address, one.state));
  const found = answer.nodes.find((one) => one.node === state.open);
  const columns = [["node", "name"], ["host", "name"], ["state", "name"], ["version", "name.wide"], ["up", "n.wide"],
    ["deaths", "n"], ["backends", "n"], ["answered", "n"], ["failed", "n"]];
  return [
    h("div.bar", {}, h("h2", {}, "Nodes"), filter("nodes")),
    found ? node(found) : null,
    table(columns, rows.map((one) => {
      const its = one.facts.broker?.backends ?? [];
      const sum = (name) => number(its.reduce((total, row) => total + row[name], 0));
      return {
        key: one.node, open,
        cells: [one.node.slice(0, 12), one.facts.host ?? one.address, dot(one.state), one.facts.package ?? "",
          one.facts.broker ? ago(one.facts.broker.broker.up_s) : "–", one.facts.restarts ?? "–",
          one.facts.broker ? `${its.filter((row) => !row.unavailable).length} of ${its.length}` : "–", sum("answered"), sum("failed")],
      };
    }), { empty: "None.", selected: state.open }),
    answer.differences.length ? [h("h2", {}, "Where nodes differ"),
      h("ul", {}, answer.differences.map((text) => h("li.care", {}, text)))] : null,
  ];
}

function node(one) {
  const its = (one.facts.broker?.backends ?? []).filter((row) => !row.unavailable || row.failed || row.restarts);
  return h("section.detail", { "aria-label": one.node },
    h("dl.facts", {}, facts({
      node: one.node, address: one.address, problem: one.problem, repair: one.repair, agent: one.facts.pid,
      broker: one.facts.broker?.broker.pid, folder: one.facts.runtime_dir,
    })),
    table([["backend", "name"], ["state", "name"], ["answered", "n"], ["failed", "n"], ["restarts", "n"]],
      its.map((row) => ({ key: row.name, cells: [row.name, dot(stateOf(row)), number(row.answered), number(row.failed), row.restarts] })),
      { empty: "No backend of it can serve." }));
}
