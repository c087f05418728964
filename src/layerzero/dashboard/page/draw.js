// Elements and charts. Text of the broker goes into the page as text alone.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600, HEIGHT = 100;

/** An element: `h("td.n", {title: "..."}, children)`. A function among the attributes listens. */
export function h(kind, attributes = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  return fill(made, attributes, children);
}

/** Likewise, of a drawing. */
export function s(kind, attributes = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const made = document.createElementNS(SVG, tag);
  if (classes.length) made.setAttribute("class", classes.join(" "));
  return fill(made, attributes, children);
}

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(2).filter((one) => one !== null && one !== undefined && one !== false)
    .map((one) => one instanceof Node ? one : String(one)));
  return made;
}

export const number = (value, digits = 0) =>
  value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });

export function duration(us) {
  if (us === null || us === undefined) return "–";
  if (us < 1000) return `${number(us, us < 10 ? 1 : 0)} us`;
  return us < 1e6 ? `${number(us / 1e3, us < 1e4 ? 1 : 0)} ms` : `${number(us / 1e6, 1)} s`;
}

export function bytes(count) {
  if (!count) return "–";
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (count >= size) return `${number(count / size, count < 10 * size ? 1 : 0)} ${unit}`;
  }
  return `${count} B`;
}

export function ago(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds % 3600 / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor(seconds % 86400 / 3600)} h`;
}

export const clock = (at) => new Date(1000 * at).toLocaleTimeString("en-GB");
const moment = (at, span) => span > 86400 ? new Date(1000 * at).toLocaleString("en-GB", { dateStyle: "short", timeStyle: "short" })
  : clock(at).slice(0, span > 3600 ? 5 : 8);

const pointers = new Map(); // where each chart's pointer is, as a share of its width

/**
 * A chart of columns of `points` over their first, the time. `lines`: {column, name, kind: "area", "line" or "bars"},
 * at most two. Where nothing was seen for longer than a slot and a half there is a gap.
 */
export function chart(title, points, lines, { text = number, logarithmic = false, end, span }) {
  const begin = end - span;
  const shown = points.filter((one) => one[0] >= begin - one[1] && one[0] <= end);
  const values = shown.flatMap((one) => lines.map((line) => one[line.column])).filter((v) => v !== null && v > 0);
  const top = values.length ? Math.max(...values) * (logarithmic ? 1.3 : 1.1) : 1;
  const floor = logarithmic && values.length ? Math.min(...values) / 1.3 : 0;
  const x = (at) => (at - begin) / span * WIDTH;
  const y = (value) => HEIGHT - (logarithmic ? Math.log(value / floor) / Math.log(top / floor) : value / top) * HEIGHT;
  const drawn = [0.25, 0.5, 0.75].map((part) => s("line.grid", { x1: 0, x2: WIDTH, y1: part * HEIGHT, y2: part * HEIGHT }));
  lines.forEach((line, order) => {
    const style = order ? "second" : "first";
    if (line.kind === "bars") {
      for (const one of shown) {
        if (!one[line.column]) continue;
        const width = Math.max(one[1] / span * WIDTH, 2);
        drawn.push(s(`rect.${style}`, { x: x(one[0]), width, y: y(one[line.column]), height: HEIGHT - y(one[line.column]) }));
      }
      return;
    }
    for (const part of parts(shown, line.column, logarithmic)) {
      const path = part.map((one, n) => `${n ? "L" : "M"}${x(one[0] + one[1] / 2).toFixed(1)} ${y(one[line.column]).toFixed(1)}`).join("");
      if (line.kind === "area") {
        const [first, last] = [part[0], part[part.length - 1]].map((one) => x(one[0] + one[1] / 2).toFixed(1));
        drawn.push(s("path.area", { d: `${path}L${last} ${HEIGHT}L${first} ${HEIGHT}Z` }));
      }
      drawn.push(s(`path.${style}`, { d: path }));
    }
  });
  const pointer = s("line.at", { y1: 0, y2: HEIGHT, visibility: "hidden" });
  const said = h("span");
  const highest = values.length ? `at most ${text(Math.max(...values))}` : "nothing yet";
  const say = (share) => {
    const at = begin + share * span;
    const found = shown.find((one) => one[0] <= at && at < one[0] + one[1]);
    pointer.setAttribute("visibility", "visible");
    pointer.setAttribute("x1", share * WIDTH);
    pointer.setAttribute("x2", share * WIDTH);
    said.textContent = `${moment(at, span)}: ${found ? lines.map((line) => `${line.name} ${text(found[line.column])}`).join(", ") : "nothing seen"}`;
  };
  const rest = () => {
    pointers.delete(title);
    pointer.setAttribute("visibility", "hidden");
    said.textContent = highest;
  };
  const svg = s("svg.chart", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}: ${highest}`,
    pointermove: (event) => {
      const box = svg.getBoundingClientRect();
      pointers.set(title, Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1));
      say(pointers.get(title));
    },
    pointerleave: rest,
  }, drawn, pointer);
  said.textContent = highest;
  if (pointers.has(title)) say(pointers.get(title));
  const keys = lines.length > 1 ? lines.map((line, n) => h(`span.key.${n ? "second" : "first"}`, {}, line.name)) : [];
  return h("figure", {}, h("figcaption", {}, h("span", {}, h("b", {}, title), keys), said), svg,
    h("div.times", {}, h("span", {}, moment(begin, span)), h("span", {}, moment(end, span))));
}

/** Stretches without a gap. */
function parts(shown, column, logarithmic) {
  const found = [];
  let last = null;
  for (const one of shown) {
    if (one[column] === null || (logarithmic && !(one[column] > 0))) continue;
    if (last === null || one[0] - last[0] > 2.5 * Math.max(last[1], one[1])) found.push([]);
    found[found.length - 1].push(one);
    last = one;
  }
  return found;
}

/**
 * A table. `columns`: [head, class]; `rows`: {key, cells, open}, `open` is called with the key when a row is chosen.
 */
export function table(columns, rows, { empty, selected = null }) {
  if (!rows.length) return h("p.soft", {}, empty);
  const body = rows.map(({ key, cells, open }) => h("tr", {
    "data-key": key, tabindex: open ? 0 : null, "aria-selected": open ? String(key === selected) : null,
    click: open ? () => open(key) : null,
    keydown: open ? (event) => { if (event.key === "Enter") { event.stopPropagation(); open(key); } } : null,
  }, cells.map((cell, n) => h(`td${columns[n][1] ? `.${columns[n][1]}` : ""}`, {}, cell))));
  return h("div.scroll", {}, h("table", {},
    h("thead", {}, h("tr", {}, columns.map(([head, style]) => h(`th${style ? `.${style}` : ""}`, { scope: "col" }, head)))),
    h("tbody", {}, body)));
}
