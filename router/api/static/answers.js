// The first ten seconds: is chat fine, how deep is the queue, are the nodes up, what does the relay cost.

import { attr, byId, el, put, show } from "./dom.js";
import { now, state } from "./state.js";
import { OUTCOMES, TODO, VERDICTS, STATES, count, long, many, near, quick, share, usd, utc } from "./words.js";

const OUT = ["down", "starting", "draining", "recycling"];
const MARKS = { good: "●", warn: "▲", bad: "■", none: "○" };

class Card {
  constructor(name, id, evidence) {
    this.mark = el("span", { class: "mark", "aria-hidden": "true" });
    this.word = el("strong", { id: `${id}-word` });
    this.lines = [0, 1, 2].map((index) => el("p", { id: `${id}-${index}` }));
    this.proof = el("dl", { class: "proof" });
    this.rows = new Map();
    this.todo = el("p", { class: "todo" });
    const told = el("p", { class: "hint" }, "Metrics: ", ...evidence.flatMap((one) => [el("code", {}, one), " "]));
    this.root = el("article", { class: "answer", id, "aria-labelledby": `${id}-h` },
      el("h2", { id: `${id}-h` }, name), el("p", { class: "verdict" }, this.mark, " ", this.word), ...this.lines, this.todo,
      el("details", {}, el("summary", {}, "evidence"), this.proof, told));
  }

  update(kind, word, lines, facts, todo = "", who = "") {
    const [step, runbook] = TODO[todo] ?? [];
    show(put(this.todo, step ? `To do${who && ` (${who})`}: ${step} Runbook: ${runbook}.` : ""), step);
    attr(this.root, "data-kind", kind);
    put(this.mark, MARKS[kind]);
    put(this.word, word);
    this.lines.forEach((line, index) => show(put(line, lines[index] ?? ""), lines[index]));
    for (const [name, value] of facts) {
      let row = this.rows.get(name);
      if (!row) {
        row = el("dd", {});
        this.rows.set(name, row);
        this.proof.append(el("div", {}, el("dt", {}, name), row));
      }
      put(row, value);
    }
  }
}

const chat = new Card("Chat", "chat", ["ebbtide_time_to_first_token_seconds", "ebbtide_calls_total", "ebbtide_relayed_total"]);
const queue = new Card("Queue", "queue", ["ebbtide_queue_calls", "ebbtide_batch_lines", "ebbtide_batch_oldest_seconds"]);
const nodes = new Card("Nodes", "fleet", ["ebbtide_node_state", "ebbtide_node_up"]);
const relay = new Card("Relay", "relay", ["ebbtide_relayed_total", "ebbtide_relay_spend_day_usd", "ebbtide_relay_spend_cap_usd"]);

export function begin() {
  byId("answers").append(chat.root, queue.root, nodes.root, relay.root);
}

export function verdict() {
  return VERDICTS[state.board.chat.verdict] ?? [state.board.chat.verdict, "warn", ""];
}

export function render() {
  renderChat(state.board.chat);
  renderQueue(state.board.queue, state.board.batches);
  renderNodes(Object.entries(state.board.nodes));
  renderRelay(state.board.relay, state.board.chat);
}

function renderChat(told) {
  const [word, kind, meaning] = verdict();
  const objective = told.objective_s === null ? "no objective yet" : `objective ${quick(told.objective_s)}`;
  const lines = [
    `first token p50 ${quick(told.ttft_p50_s)}, p95 ${quick(told.ttft_p95_s)}`,
    `${objective}, ${told.failed ? `${many(told.failed, "error")} (${share(told.failed / told.calls)})` : "no errors"}`,
    told.waiting ? `${many(told.waiting, "call")} waiting now` : "",
  ];
  if (!told.calls) lines[0] = `nobody asked in ${told.minutes} min`;
  chat.update(kind, word, lines, [
    ["means", meaning],
    ["over", `the last ${told.minutes} min`],
    ["calls ended", `${count(told.calls)}, of which ${count(told.failed)} failed, timed out, were refused or cut`],
    ["failed where", told.failures.length ? told.failures.map(failed).join("; ") : "nowhere"],
    ["objective", told.objective_stated ? "stated: pools.interactive.ttft_p95_ms" : "auto: 3 × the slowest node's own first token"],
    ["on the relay", told.calls ? share(Math.min(1, told.relayed / told.calls)) : "0 %"],
  ], told.verdict);
}

const failed = ({ node, outcome, calls }) => `${count(calls)} ${OUTCOMES[outcome] ?? outcome} ${node ? `on ${node}` : "before any node"}`;

function renderQueue(told, batches) {
  const waiting = told.interactive + told.batch;
  const late = told.ends_at !== null && told.window_at !== null && Object.values(batches ?? {}).some(
    (one) => one.left && one.ends_at !== null && one.ends_at > one.expires_at);
  const word = told.lines ? `${count(told.lines)} ${told.lines === 1 ? "line" : "lines"} left`
    : waiting ? `${many(waiting, "call")} waiting` : "empty";
  const trouble = state.board.router.store_trouble;
  const oldest = told.oldest_batch_at ?? told.oldest_call_at;
  const lines = [
    trouble ?? (oldest ? `oldest waits for ${long(now() - oldest)}` : ""),
    told.ends_at ? `done by ${near(told.ends_at, now())}${told.window_at ? `; first window closes ${near(told.window_at, now())}` : ""}`
      : told.lines ? "nothing moves: no estimate" : "",
    `${many(told.interactive, "chat")} and ${many(told.batch, "batch call")} wait for room`,
  ];
  if (late) lines[1] += ", too early";
  const kind = trouble ? "bad" : late || (told.lines && !told.ends_at) ? "warn" : "good";
  queue.update(kind, word, lines, [
    ["lines", `${count(told.lines)} left in ${many(told.batches, "batch", "batches")}, ${count(told.lines_running)} running`],
    ["pace", `${count(told.lines_a_minute)} lines in the last minute, by all routers`],
    ["first window closes", told.window_at ? `${near(told.window_at, now())} (${utc(told.window_at)})` : "none is open"],
    ["done by", told.ends_at ? utc(told.ends_at) : "unknown"],
  ], trouble ? "store" : late ? "late" : kind === "warn" ? "stuck" : "");
}

function nodeToDo(down, diagnosed) {
  const [names, todo] = down.length ? [down, "node_down"] : [diagnosed, diagnosed.length ? "ill" : ""];
  return [todo, names.slice(0, 3).join(", ") + (names.length > 3 ? ` and ${names.length - 3} more` : "")];
}

function renderNodes(entries) {
  const all = entries.map(([, node]) => node);
  const counts = {};
  for (const node of all) counts[node.state] = (counts[node.state] ?? 0) + 1;
  const usable = all.filter((node) => !OUT.includes(node.state)).length;
  const ill = all.filter((node) => node.trouble || node.blind || node.trend?.verdict).length;
  const down = entries.filter(([, node]) => STATES[node.state] === "bad").map(([name]) => name);
  const diagnosed = entries.filter(([, node]) => node.trend?.verdict).map(([name]) => name);
  const kind = !all.length ? "none" : !usable ? "bad" : down.length || ill || usable < all.length ? "warn" : "good";
  const states = Object.entries(counts).map(([name, number]) => `${number} ${name}`).join(", ");
  const running = all.reduce((sum, node) => sum + Object.values(node.phases).reduce((one, more) => one + more, 0), 0);
  nodes.update(kind, all.length ? `${usable} of ${all.length} up` : "none", [
    states, ill ? `${ill} with trouble: see below` : "", `${many(running, "call")} running`,
  ], [["up", "neither down nor starting nor taken out"]], ...nodeToDo(down, diagnosed));
}

function renderRelay(told, { calls, relayed }) {
  if (!told) {
    relay.update("none", "not set", ["calls that find no room are refused after their patience"], []);
    return;
  }
  const part = calls ? Math.min(1, relayed / calls) : 0;
  const capped = told.cap_usd !== undefined;
  const full = capped && told.day_usd >= told.cap_usd;
  relay.update(full ? "bad" : part > 0.2 ? "warn" : "good", full ? "its cap is reached" : `${share(part)} of calls`, [
    capped ? `${usd(told.day_usd)} of ${usd(told.cap_usd)} in 24 h` : "no spend cap is set",
    told.canary ? `control ${quick(told.canary.ttft_s)} ± ${quick(told.canary.spread_s)}`
      : told.calls ? `first token p50 ${quick(told.ttft_p50_s)}` : "",
  ], [
    ["models", told.models.join(", ")],
    ["calls in 5 min", count(told.calls)],
    ["of batches in 24 h", capped ? usd(told.batches_usd) : "not counted"],
  ], full ? "capped" : part > 0.2 ? "carries" : "");
}
