// Each node: its state and why, its room as a bar, what runs on it in which phase, and how it has changed.

import { operate } from "./acts.js";
import { Keyed, Pager, Spark, attr, byId, el, put, show } from "./dom.js";
import { now, state } from "./state.js";
import { ENGINES, PARTS, PHASES, POOLS, STATES, compact, count, long, many, quick, share, utc } from "./words.js";

const MARKS = { good: "●", warn: "▲", bad: "■", none: "○" };
const ORDER = { bad: 0, warn: 1, none: 2, good: 3 };
const YAML = `nodes:
  - name: a
    url: http://127.0.0.1:8001`;

let pager;
let empty;

export function begin() {
  const root = byId("nodes");
  pager = new Pager(root, 12, "nodes", make);
  pager.list.classList.add("nodes");
  empty = el("div", { class: "empty" }, el("p", {}, "No node fits the filter, or none is set. Three lines of YAML make one:"),
    el("pre", {}, el("code", {}, YAML)));
  root.append(empty);
  for (const [part, word] of PARTS) {
    byId("legend").append(el("li", {}, el("span", { class: `part ${part}`, "aria-hidden": "true" }), " ", word));
  }
}

export const kindOf = (node) => {
  const kind = STATES[node.state] ?? "warn";
  return kind === "good" && (node.trouble || node.blind || node.trend?.verdict) ? "warn" : kind;
};

export function render() {
  const nodes = Object.entries(state.board.nodes).sort(
    ([name, node], [other, than]) => ORDER[kindOf(node)] - ORDER[kindOf(than)] || name.localeCompare(other, "en", { numeric: true }));
  const ill = nodes.filter(([, node]) => kindOf(node) !== "good").length;
  put(byId("nodes-count"), nodes.length ? `${nodes.length}${ill ? `, ${ill} of them not well: these first` : ""}` : "");
  show(byId("legend"), nodes.length);
  show(empty, !nodes.length);
  show(pager.list, nodes.length);
  pager.render(nodes);
}

function make(name) {
  const view = {
    facts: el("span", { class: "facts" }), mark: el("span", { class: "mark", "aria-hidden": "true" }), state: el("span", {}),
    cause: el("p", { class: "cause" }), bar: el("div", { class: "bar", role: "img" }), room: el("p", { class: "parts" }),
    runs: el("p", { class: "runs" }), spark: new Spark(), ttft: el("span", {}), rss: new Spark(), memory: el("span", {}),
    acts: el("p", { class: "buttons" }), rows: el("tbody", {}), models: el("p", {}), proof: el("p", { class: "hint" }), rest: el("p", { class: "hint" }),
  };
  view.parts = PARTS.map(([part]) => view.bar.appendChild(el("span", { class: `part ${part}` })));
  view.calls = new Keyed(view.rows, makeCall);
  view.trend = el("p", { class: "trend" }, view.spark.root, " ", view.ttft);
  view.grown = el("p", { class: "trend" }, view.rss.root, " ", view.memory);
  view.more = el("details", { ontoggle: () => view.node && updateCalls(view, view.node) }, el("summary", {}, "calls, models, evidence"), view.models, view.proof, table(view.rows), view.rest);
  view.buttons = Object.fromEntries(["drain", "resume", "recycle"].map((act) => [act, view.acts.appendChild(
    el("button", { type: "button", onclick: () => operate(act, name) }, act[0].toUpperCase() + act.slice(1),
      el("span", { class: "visually-hidden" }, ` node ${name}`)))]));
  view.root = el("article", { class: "node", "data-node": name },
    el("header", {}, el("h3", {}, name), el("p", { class: "state" }, view.mark, " ", view.state), view.facts),
    view.cause, view.bar, view.room, view.runs, el("div", { class: "trends" }, view.trend, view.grown), view.more, view.acts);
  view.update = (node) => update(view, node);
  return view;
}

function table(rows) {
  const heads = ["phase", "began", "prompt tokens", "model", "key"].map((word) => el("th", { scope: "col" }, word));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Running calls" },
    el("table", {}, el("thead", {}, el("tr", {}, ...heads)), rows));
}

function makeCall() {
  const cells = [0, 1, 2, 3, 4].map(() => el("td", {}));
  return {
    root: el("tr", {}, ...cells),
    update([workload, phase, began, tokens, model, caller]) {
      put(cells[0], `${POOLS[workload]}, ${PHASES[phase]}`);
      put(cells[1], `${long(now() - began)} ago`);
      attr(cells[1], "title", utc(began));
      put(cells[2], count(tokens));
      put(cells[3], model);
      put(cells[4], caller || "-");
    },
  };
}

function update(view, node) {
  view.node = node;
  const kind = kindOf(node);
  const engine = ENGINES[node.engine] ?? node.engine;
  attr(view.root, "data-kind", kind);
  put(view.mark, MARKS[kind]);
  put(view.state, node.state + (node.blind ? ", does not tell its load" : ""));
  const context = node.context ? `${count(node.context)}-token context` : "context unknown";
  put(view.facts, `${engine}${node.version ? ` ${node.version}` : ""} · ${context} · ${node.pools.map((one) => POOLS[one]).reverse().join(" and ")}`);
  const since = node.since && kind !== "good" ? `, ${node.state} for ${long(now() - node.since)}` : "";
  const verdict = node.trend?.verdict ?? "";
  const limit = verdict && node.trend.limit_s !== null ? `; at its limit in ${long(node.trend.limit_s)}` : "";
  const cause = verdict && node.cause.startsWith("diagnosis:") ? "" : node.trouble || (verdict && STATES[node.state] === "good" ? "" : node.cause);
  const why = [cause, verdict + limit].filter(Boolean).join(" · ") + since;
  show(put(view.cause, why), kind !== "good");
  attr(view.cause, "title", node.since ? utc(node.since) : null);
  updateRoom(view, node.room);
  updateRuns(view, node);
  updateTrends(view, node);
  updateCalls(view, node);
  const may = state.you.acts;
  const out = ["draining", "recycling"].includes(node.state);
  for (const [act, button] of Object.entries(view.buttons)) {
    show(button, may.includes(act) && (act === "resume" ? out : act === "recycle" || !out));
  }
  show(view.acts, may.includes("drain"));
}

function updateRoom(view, room) {
  const known = room.unit !== null;
  show(view.bar, known);
  const told = [];
  PARTS.forEach(([part, word], index) => {
    const size = room[part] ?? 0;
    view.parts[index].style.width = known && room.capacity ? `${(100 * size) / room.capacity}%` : "0";
    if (size) told.push(`${word} ${compact(size)}`);
  });
  const unit = room.unit === "tokens" ? "KV tokens" : "sequences";
  put(view.room, known ? `${told.join(" · ")} ${unit}, of ${compact(room.capacity)}` : "room: the node does not tell");
  attr(view.bar, "aria-label", `Room in ${unit}: ${told.join(", ")}, of ${compact(room.capacity ?? 0)}`);
}

function updateRuns(view, { phases, foreign, load }) {
  const told = [];
  for (const pool of ["interactive", "batch"]) {
    const [reading, writing] = [phases[`${pool}_prefill`], phases[`${pool}_decode`]];
    if (reading + writing) told.push(`${POOLS[pool]} ${reading + writing} (${reading} reading, ${writing} writing)`);
  }
  if (foreign) told.push(`others' ${foreign}`);
  const [running, waiting, used] = load;
  const engine = [];
  if (running !== null) engine.push(`${running} running`);
  if (waiting !== null) engine.push(`${waiting} waiting`);
  if (used !== null) engine.push(`KV ${share(used)}`);
  put(view.runs, `${told.join(", ") || "nothing of ours runs"}${engine.length ? ` · engine says ${engine.join(", ")}` : ""}`);
}

function updateTrends(view, node) {
  const trail = node.trail_s.filter(([, seconds]) => seconds !== null);
  const drift = node.trend?.ttft_drift ?? null;
  const moved = drift === null ? "" : `, drift ${drift >= 0 ? "+" : "−"}${share(Math.abs(drift))}`;
  const last = trail.length ? trail.at(-1)[1] : null;
  const alone = node.unloaded_s === null ? "" : `, alone ${quick(node.unloaded_s)}`;
  show(view.trend, trail.length || drift !== null);
  put(view.ttft, `first token ${last === null ? "not seen yet" : quick(last)}${alone}${moved}`);
  show(view.spark.root, trail.length);
  view.spark.update(trail, `Median first token by minute in the last hour, last ${quick(last)}${moved}`);
  const slope = node.trend?.rss_bytes_an_hour ?? null;
  const memory = node.trend?.rss_bytes ?? [];
  show(view.grown, slope !== null || memory.length);
  if (slope !== null || memory.length) {
    const sizes = memory.map(([, bytes]) => bytes);
    const size = memory.length ? ` ${(sizes.at(-1) / 2 ** 30).toFixed(1)} GiB` : "";
    const told = `memory${size}${slope === null ? ", growth not known yet" : `, ${slope >= 0 ? "+" : "−"}${(Math.abs(slope) / 2 ** 20).toFixed(1)} MiB/h`}`;
    put(view.memory, told);
    view.rss.update(memory, `Resident memory, ${told}`, Math.min(...sizes, 0.95 * Math.max(...sizes)));
  }
}

function updateCalls(view, node) {
  const running = Object.values(node.phases).reduce((one, more) => one + more, 0);
  put(view.models, `Models: ${node.models.join(", ") || "none told"}`);
  if (!view.more.open) return;
  const evidence = node.trend?.evidence ?? [];
  put(view.proof, evidence.length ? `Diagnosis by: ${evidence.join("; ")}` : "No diagnosis yet: not enough is known.");
  view.calls.render(node.calls.map((call, index) => [`${call[2]} ${index}`, call]));
  put(view.rest, running > node.calls.length ? `The ${node.calls.length} oldest of ${many(running, "call")}.` : "");
}
