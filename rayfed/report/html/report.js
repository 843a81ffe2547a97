// Interaction of a report: sort and filter tables, update the plot, show the images of a setting.
// The script has no network access. `Plotly` is defined if the page has a plot.
"use strict";

const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "star", "cross", "x"];
const PAGE = 24; // pairs of images per page of the gallery
const FAR = 30; // minimum ratio of the largest to the smallest value for a logarithmic axis

const byId = id => document.getElementById(id);
const data = JSON.parse(byId("explorer-data")?.textContent ?? "null");
const pictures = byId("pictures")?.content;
const plot = byId("plot");
let chosen = null;

// ---- tables

function sortBy(table, column, descending) {
  const value = row => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
  };
  const missing = key => key === "–" || key === "";
  const compare = (a, b) => {
    if (missing(a) || missing(b)) return missing(a) - missing(b); // last in either direction
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
    return descending ? -order : order;
  };
  const body = table.tBodies[0];
  const keyed = [...body.rows].map(row => [value(row), row]);
  body.append(...keyed.sort(([a], [b]) => compare(a, b)).map(([, row]) => row));
}

for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => heading.addEventListener("click", () => {
    const descending = heading.ariaSort === "ascending";
    for (const other of headings) other.ariaSort = "none";
    heading.ariaSort = descending ? "descending" : "ascending";
    sortBy(table, column, descending);
  }));
}

function filterRows() {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const [arm, attack] = [byId("filter-arm").value, byId("filter-attack").value];
  const rows = [...byId("settings").tBodies[0].rows];
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word))
      || (arm !== "" && row.dataset.arm !== arm) || (attack !== "" && row.dataset.attack !== attack);
  }
  const shown = rows.filter(row => !row.hidden);
  byId("filter-count").textContent = `${shown.length} of ${rows.length}`;
  draw(new Set(shown.map(row => Number(row.dataset.entry))));
}

// ---- the plot

const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const seriesOf = arm => colour(`--series-${data.arms.indexOf(arm) % data.series}`);

/** Which of the points no setting beats on both axes; a setting counts by the attack that gets most out of it. */
function front(points, x, y) {
  const better = (measure, a, b) => (measure.higher ? a > b : a < b);
  const settings = new Map();
  for (const point of points) {
    const other = settings.get(point.group);
    if (!other || better(x, other.x, point.x)) settings.set(point.group, point);
  }
  const all = [...settings.values()];
  const beats = (a, b) => !better(x, b.x, a.x) && !better(y, b.y, a.y) && (a.x !== b.x || a.y !== b.y);
  return all.filter(point => !all.some(other => beats(other, point))).sort((a, b) => a.x - b.x || a.y - b.y);
}

function axis(measure, means) {
  const low = Math.min(...means), high = Math.max(...means);
  const far = low > 0 && high > FAR * low;
  const pad = (high - low || Math.abs(high) || 1) * 0.15;
  return {
    title: { text: `${measure.title}${measure.unit ? ` (${measure.unit})` : ""}, ${measure.higher ? "more" : "less"} is better` },
    type: far ? "log" : "linear",
    range: far ? [Math.log10(low) - 0.2, Math.log10(high) + 0.2] : [low - pad, high + pad],
    tickformat: measure.share ? ".3~%" : measure.unit === "bytes" ? "~s" : "~g",
    gridcolor: colour("--line"), linecolor: colour("--line"), zeroline: false, automargin: true,
    ...(far ? { dtick: "D2" } : {}),
  };
}

function errorBar(points, axisName) {
  const intervals = points.map(point => point[`${axisName}Interval`]);
  if (!intervals.some(([, low]) => low !== null)) return { visible: false };
  return {
    type: "data", symmetric: false, thickness: 1, width: 0,
    array: intervals.map(([mean, , high]) => (high === null ? 0 : high - mean)),
    arrayminus: intervals.map(([mean, low]) => (low === null ? 0 : mean - low)),
  };
}

/** Plain text for a hover label, which knows a few tags. */
const plain = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

function armTrace(arm, points, x, y) {
  const mine = points.filter(point => point.arm === arm);
  return {
    type: "scatter", mode: "markers", name: plain(arm), customdata: mine.map(point => point.id),
    x: mine.map(point => point.x), y: mine.map(point => point.y),
    error_x: errorBar(mine, "x"), error_y: errorBar(mine, "y"),
    marker: {
      color: seriesOf(arm), size: 11, opacity: 0.9, line: { color: colour("--surface"), width: 1 },
      symbol: mine.map(point => SYMBOLS[Math.min(Math.max(data.attacks.indexOf(point.attack), 0), SYMBOLS.length - 1)]),
    },
    text: mine.map(point => `<b>${plain(point.title)}</b><br>${plain(point.attack ?? "no attack")}<br>`
      + `${x.title}: ${point.xInterval[3]}<br>${y.title}: ${point.yInterval[3]}`),
    hovertemplate: "%{text}<extra></extra>",
  };
}

let visible = new Set();

function draw(entries = visible) {
  visible = entries;
  if (!plot) return;
  const [xName, yName] = [byId("x-axis").value, byId("y-axis").value];
  const [x, y] = [data.measures[xName], data.measures[yName]];
  const points = data.entries
    .filter(entry => entry.finished && entries.has(entry.id) && entry.values[xName] && entry.values[yName])
    .map(entry => ({
      ...entry, xInterval: entry.values[xName], yInterval: entry.values[yName],
      x: entry.values[xName][0], y: entry.values[yName][0],
    }));
  const best = front(points.filter(point => point.compared), x, y);
  const ringed = points.filter(point => point.id === chosen);
  const traces = [
    {
      name: "front", x: best.map(p => p.x), y: best.map(p => p.y), mode: "lines+markers", hoverinfo: "skip",
      line: { shape: x.higher ? "vh" : "hv", dash: "dot", width: 2, color: colour("--muted") },
      marker: { symbol: "circle-open", size: 17, color: colour("--muted"), line: { width: 1 } },
    },
    ...data.arms.map(arm => armTrace(arm, points, x, y)),
    {
      name: "chosen", x: ringed.map(p => p.x), y: ringed.map(p => p.y), mode: "markers", hoverinfo: "skip",
      marker: { symbol: "circle-open", size: 22, color: colour("--ink"), line: { width: 2.5 } },
    },
  ];
  byId("plot-count").textContent = `Points: the ${points.length} of ${entries.size} rows of the table that finished and have both measures.`;
  const touch = matchMedia("(pointer: coarse)").matches;
  Plotly.react(plot, traces, {
    xaxis: axis(x, points.map(p => p.x)), yaxis: axis(y, points.map(p => p.y)),
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("--muted") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    hoverlabel: { bgcolor: colour("--sunken"), bordercolor: colour("--line"), font: { color: colour("--ink") }, align: "left" },
    margin: { l: 60, r: 16, t: 10, b: 52 }, dragmode: touch ? false : "zoom",
  }, { displayModeBar: false, responsive: true });
}

// ---- the images of one setting

/** Fill the panel. */
function choose(id) {
  chosen = id;
  const entry = data.entries[id];
  const figures = pictures ? [...pictures.querySelectorAll(`[data-entry="${id}"]`)] : [];
  const panel = byId("chosen");
  panel.querySelector("h3").textContent = entry.attack ? `${entry.title} · ${entry.attack}` : entry.title;
  panel.querySelector(".note").textContent = figures.length ? entry.note : `${entry.note} It has no images on this page.`;
  panel.querySelector(".pairs").replaceChildren(...figures.map(figure => figure.cloneNode(true)));
  for (const row of byId("settings").tBodies[0].rows) row.classList.toggle("chosen", Number(row.dataset.entry) === id);
  panel.scrollTop = 0;
}

function show(id) {
  choose(id);
  byId("chosen").scrollIntoView({ block: "nearest" });
  draw();
}

// ---- the gallery

let shownPairs = PAGE;

function showGallery() {
  const [arm, attack, order] = ["gallery-arm", "gallery-attack", "gallery-order"].map(id => byId(id).value);
  const metric = order.replace("-", ""), sign = order.startsWith("-") ? 1 : -1;
  const key = figure => {
    const value = Number(figure.dataset[metric]?.replace("inf", "Infinity")); // as Python writes it
    return Number.isNaN(value) ? Infinity : sign * value;
  };
  const all = [...pictures.querySelectorAll("figure")].filter(figure =>
    (arm === "" || figure.dataset.arm === arm) && (attack === "" || figure.dataset.attack === attack));
  const keyed = all.map(figure => [key(figure), figure]).sort(([a], [b]) => (a === b ? 0 : a - b));
  const figures = keyed.slice(0, shownPairs).map(([, figure]) => figure.cloneNode(true));
  byId("gallery").querySelector(".pairs").replaceChildren(...figures);
  byId("gallery-count").textContent = `${figures.length} of ${all.length}`;
  byId("more").hidden = figures.length === all.length;
}

// ---- start

if (plot) {
  for (const [id, name] of [["x-axis", data.x], ["y-axis", data.y]]) {
    byId(id).value = name;
    byId(id).addEventListener("change", () => draw());
  }
}
if (data) {
  for (const id of ["filter", "filter-arm", "filter-attack"]) byId(id).addEventListener("input", filterRows);
  byId("settings").tBodies[0].addEventListener("click", event => show(Number(event.target.closest("tr").dataset.entry)));
  const first = pictures?.querySelector("[data-entry]");
  if (first) choose(Number(first.dataset.entry));
  filterRows();
  plot?.on("plotly_click", event => event.points[0].customdata !== undefined && show(event.points[0].customdata));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
}
if (pictures) {
  for (const id of ["gallery-arm", "gallery-attack", "gallery-order"]) byId(id).addEventListener("input", () => {
    shownPairs = PAGE;
    showGallery();
  });
  byId("more").addEventListener("click", () => {
    shownPairs += PAGE;
    showGallery();
  });
  showGallery();
}

// Open folded parts for printing, and for links into them.
const open = root => root?.querySelectorAll("details.fold").forEach(part => { part.open = true; });
addEventListener("beforeprint", () => open(document));
addEventListener("hashchange", () => open(document.querySelector(`section[id="${CSS.escape(location.hash.slice(1))}"]`)));

// Mark tables that are wider than their box.
const sized = new ResizeObserver(entries => {
  for (const { target } of entries) target.classList.toggle("wider", target.scrollWidth > target.clientWidth + 1);
});
document.querySelectorAll(".scroll").forEach(box => sized.observe(box));
