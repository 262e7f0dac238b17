// The last hour in four charts, drawn by uPlot; each also in words, and as a table for whoever cannot see it.

import { byId, el, put, show } from "./dom.js";
import { state } from "./state.js";
import { clock, compact, quick } from "./words.js";

const [CHATS, CALLS, LINES, P50, P95, CHAT_TOKENS, BATCH_TOKENS] = [0, 1, 2, 3, 4, 5, 6];
const HUES = ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6", "--s7", "--s8", "--s9"];
const STEP = 10;
const REST = "rest";
const WHOLE = [1, 2, 5].flatMap((one) => [0, 1, 2, 3, 4, 5, 6, 7].map((power) => one * 10 ** power)).sort((one, other) => one - other);
const charts = [];
let drawn = "";

export function begin() {
  charts.push(
    new Lines("Batch lines left, by batch", (value) => `${compact(value)} lines`, stacked, WHOLE),
    new Lines("First token of chat", quick, firstTokens),
    new Lines("Calls waiting for room", (value) => `${compact(value)} calls`, waiting, WHOLE),
    new Lines("Tokens written a second", (value) => `${compact(value)} tokens/s`, tokens),
  );
  byId("charts").append(...charts.map((one) => one.root));
  new ResizeObserver(() => charts.forEach((one) => one.fit())).observe(byId("charts"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
}

export function recolour() {
  for (const one of charts) one.reset();
  drawn = "";
}

/** Drawn when a point was added or changed, not on every frame. */
export function render() {
  const series = state.board.series;
  const keys = Object.keys(series);
  const last = keys.at(-1);
  const now = `${keys.length} ${last} ${last ? JSON.stringify(series[last]) : ""}`;
  if (now === drawn) return;
  drawn = now;
  const points = filled(keys.map(Number).sort((one, other) => one - other), series);
  for (const one of charts) one.draw(points);
}

/** One point each ten seconds: lines left stay what they were, the rest is nothing where nothing was seen. */
function filled(times, series) {
  const points = [];
  let lines = {};
  for (let at = times[0]; times.length && at <= times.at(-1); at += STEP) {
    const point = series[at];
    if (point && Object.keys(point[LINES]).length) lines = point[LINES];
    else if (point && at > times.at(-1) - STEP * 4 && !Object.keys(state.board.batches ?? {}).some((id) => state.board.batches[id].left)) lines = {};
    points.push({ at, point: point ?? [0, 0, lines, null, null, 0, 0], lines });
  }
  return points;
}

function stacked(points) {
  const latest = {};
  for (const { lines } of points) for (const [id, left] of Object.entries(lines)) latest[id] = left;
  const ids = Object.keys(latest).sort((one, other) => (one === REST) - (other === REST)).slice(0, HUES.length);
  const below = points.map(() => 0);
  const series = ids.map((id, index) => {
    const own = points.map(({ lines }) => lines[id] ?? 0);
    const values = own.map((value, at) => (below[at] += value));
    return { name: id === REST ? "other batches" : short(id), values, own, hue: HUES[index], fill: true };
  });
  return series.reverse();
}

const short = (id) => (id.length > 14 ? `${id.slice(0, 6)}…${id.slice(-6)}` : id);

function firstTokens(points) {
  const objective = state.board.chat.objective_s;
  const series = [
    { name: "p50", values: points.map(({ point }) => point[P50]), hue: "--chat" },
    { name: "p95", values: points.map(({ point }) => point[P95]), hue: "--s2", dash: [6, 3] },
  ];
  if (objective !== null) series.push({ name: "objective", values: points.map(() => objective), hue: "--ink", dash: [2, 4], steady: true });
  return series;
}

function waiting(points) {
  return [
    { name: "chat", values: points.map(({ point }) => point[CHATS]), hue: "--chat" },
    { name: "batch", values: points.map(({ point }) => point[CALLS]), hue: "--s2", dash: [6, 3] },
  ];
}

function tokens(points) {
  return [
    { name: "chat", values: points.map(({ point }) => point[CHAT_TOKENS]), hue: "--chat" },
    { name: "batch", values: points.map(({ point }) => point[BATCH_TOKENS]), hue: "--s2", dash: [6, 3] },
  ];
}

class Lines {
  constructor(title, told, series, steps) {
    Object.assign(this, { told, series, steps, chart: null, names: "" });
    this.box = el("div", { class: "plot", "aria-hidden": "true" });
    this.words = el("p", { class: "parts" });
    this.keys = el("ul", { class: "legend", "aria-label": `Lines of the chart: ${title}` });
    this.empty = el("p", { class: "empty" }, "Nothing to draw yet.");
    this.rows = el("table", {});
    this.table = el("details", { ontoggle: () => this.last && this.list(this.last) }, el("summary", {}, "as a table"),
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Table: ${title}` }, this.rows));
    this.root = el("figure", { class: "chart" }, el("figcaption", {}, title), this.box, this.empty, this.keys, this.words, this.table);
  }

  draw(points) {
    const series = this.series(points);
    const some = series.some((one) => !one.steady && one.values.some((value) => value));
    show(this.box, some);
    show(this.keys, some);
    show(this.table, some);
    show(this.empty, !some);
    put(this.words, some ? this.summary(series) : "");
    if (!some) return;
    this.last = { points, series };
    const names = series.map((one) => one.name).join("|");
    if (names !== this.names) this.reset();
    this.names = names;
    const data = [points.map(({ at }) => at), ...series.map((one) => one.values)];
    if (this.chart) this.chart.setData(data);
    else this.chart = this.make(series, data);
    if (this.table.open) this.list(this.last);
  }

  make(series, data) {
    const [ink, grid] = [colour("--soft"), colour("--line")];
    this.keys.replaceChildren(...series.map((one) => key(one)));
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "12px system-ui" };
    return new uPlot({
      width: this.wide(), height: 170, legend: { show: false }, cursor: { show: false }, padding: [10, 22, 0, 0],
      scales: { y: { range: (_, low, high) => [0, Math.max(high ?? 1, 1e-3) * 1.1] } },
      axes: [
        { ...axis, size: 28, space: 64, values: (_, times) => times.map((at) => clock(at).slice(0, times.length > 1 && times[1] - times[0] < 60 ? 8 : 5)) },
        { ...axis, size: 62, ...(this.steps && { incrs: this.steps }), values: (_, values) => values.map((value) => this.told(value).replace(/ (lines|calls|tokens\/s)$/, "")) },
      ],
      series: [{}, ...series.map((one) => ({
        stroke: colour(one.hue), width: 2, dash: one.dash, fill: one.fill ? colour(one.hue) : undefined,
        points: { show: !one.fill && data[0].length < 3 }, spanGaps: true,
      }))],
    }, data, this.box);
  }

  reset() {
    this.chart?.destroy();
    this.chart = null;
    this.names = "";
  }

  wide() {
    return Math.max(200, Math.floor(this.root.clientWidth) - 2);
  }

  fit() {
    if (this.chart && this.chart.width !== this.wide()) this.chart.setSize({ width: this.wide(), height: 170 });
  }

  summary(series) {
    const told = series.filter((one) => !one.steady).slice(0, 4).map((one) => {
      const values = (one.own ?? one.values).filter((value) => value !== null);
      return values.length ? `${one.name} now ${this.told(values.at(-1))}, most ${this.told(Math.max(...values))}` : `${one.name} none`;
    });
    return told.join("; ");
  }

  list({ points, series }) {
    if (!this.table.open) return;
    const rows = points.map((point, index) => index).filter((index) => index % 30 === 0 || index === points.length - 1).slice(-13);
    const heads = ["time", ...series.map((one) => one.name)].map((word) => el("th", { scope: "col" }, word));
    this.rows.replaceChildren(el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows.map((index) =>
      el("tr", {}, el("td", {}, clock(points[index].at)), ...series.map((one) => {
        const value = (one.own ?? one.values)[index];
        return el("td", {}, value === null ? "-" : this.told(value));
      })))));
  }
}

function key(one) {
  const mark = el("span", { class: `key ${one.fill ? "filled" : one.dash ? (one.dash[0] < 4 ? "dotted" : "dashed") : "solid"}`, "aria-hidden": "true" });
  mark.style.color = `var(${one.hue})`;
  return el("li", {}, mark, " ", one.name);
}

const probe = el("span", { hidden: true });

/** A colour of the style sheet as the canvas needs it, for the theme that is on. */
function colour(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}
