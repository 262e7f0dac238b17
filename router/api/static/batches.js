// Batches: how far, how long their window is, what failed; one opens to show its lines by state.

import { cancel, get } from "./acts.js";
import { Pager, attr, byId, el, put, show } from "./dom.js";
import { now, state } from "./state.js";
import { count, long, many, near, share, utc } from "./words.js";

const OPEN = new Set(["validating", "in_progress", "finalizing", "cancelling"]);
const KINDS = { completed: "good", failed: "bad", expired: "bad", cancelled: "none", cancelling: "none" };
const MARKS = { good: "●", warn: "▲", bad: "■", none: "○" };

let pager;
let none;
let off;

export function begin() {
  const root = byId("batches");
  pager = new Pager(root, 10, "batches", make);
  const at = location.origin;
  none = el("div", { class: "empty" }, el("p", {}, "No batch here. These make one:"), el("pre", { tabindex: "0" }, el("code", {},
    `curl ${at}/v1/files -F purpose=batch -F file=@lines.jsonl
curl ${at}/v1/batches -H 'content-type: application/json' \\
  -d '{"input_file_id": "file-...", "endpoint": "/v1/chat/completions", "completion_window": "24h"}'`)));
  off = el("p", { class: "empty" }, "Batches are switched off here (batches.enabled: false).");
  root.append(none, off);
}

export function render() {
  const batches = state.board.batches;
  const rows = Object.entries(batches ?? {}).sort(([, one], [, other]) => one.place - other.place);
  const going = rows.filter(([, one]) => OPEN.has(one.state)).length;
  put(byId("batches-count"), rows.length ? `${going} under way, in the order they are served` : "");
  show(off, batches === null);
  show(none, batches !== null && !rows.length);
  show(pager.list, rows.length);
  pager.render(rows);
}

function make(id) {
  const view = {
    mark: el("span", { class: "mark", "aria-hidden": "true" }), state: el("span", {}), who: el("span", { class: "facts" }),
    fill: el("span", { class: "fill" }), bad: el("span", { class: "fill failed" }), done: el("p", { class: "parts" }),
    when: el("p", { class: "runs" }), why: el("p", { class: "cause" }),
  };
  view.bar = el("div", { class: "bar thin", role: "img" }, view.fill, view.bad);
  view.stop = el("button", { type: "button", class: "danger", onclick: () => cancel(state.board.batches[id]) }, "Cancel",
    el("span", { class: "visually-hidden" }, ` ${id}`));
  const open = el("button", { type: "button", onclick: () => lines(id) }, "Lines", el("span", { class: "visually-hidden" }, ` of ${id}`));
  view.root = el("article", { class: "batch", "data-batch": id },
    el("header", {}, el("h3", {}, id), el("p", { class: "state" }, view.mark, " ", view.state), view.who),
    view.bar, view.done, view.when, view.why, el("p", { class: "buttons" }, open, view.stop));
  view.update = (batch) => update(view, batch);
  return view;
}

function update(view, batch) {
  const going = OPEN.has(batch.state);
  const late = going && batch.ends_at !== null && batch.ends_at > batch.expires_at;
  const kind = KINDS[batch.state] ?? (late ? "warn" : "good");
  attr(view.root, "data-kind", kind);
  put(view.mark, MARKS[kind]);
  put(view.state, batch.state.replace("_", " ") + (late ? ", will be late" : ""));
  put(view.who, `${batch.caller || "no key"} · ${batch.model ?? "several models"}${batch.priority ? ` · priority ${batch.priority}` : ""}`);
  const ended = batch.completed + batch.failed;
  view.fill.style.width = batch.total ? `${(100 * batch.completed) / batch.total}%` : "0";
  view.bad.style.width = batch.total ? `${(100 * batch.failed) / batch.total}%` : "0";
  const told = [`${count(ended)} of ${many(batch.total, "line")}${batch.total ? ` (${share(ended / batch.total)})` : ""}`];
  if (batch.running) told.push(`${batch.running} running`);
  told.push(`${count(batch.failed)} failed`, `${count(batch.taken_back)} taken back`);
  if (batch.stopped) told.push(`${count(batch.stopped)} stopped`);
  const end = batch.ends_at === null ? "no estimate yet" : `done by ${near(batch.ends_at, now())}`;
  put(view.done, told.join(" · "));
  attr(view.bar, "aria-label", told.join(", "));
  attr(view.done, "title", "taken back: since this router started");
  const left = batch.expires_at - now();
  put(view.when, going ? `window closes in ${long(left)} (${near(batch.expires_at, now())}) · ${batch.left ? end : "lines done"}`
    : `made ${near(batch.created_at, now())}`);
  attr(view.when, "title", utc(going ? batch.expires_at : batch.created_at));
  show(put(view.why, batch.waiting ?? ""), going && batch.waiting && !batch.running);
  show(view.stop, going && batch.state !== "cancelling" && state.you.acts.includes("cancel"));
}

async function lines(id) {
  const [dialog, what] = [byId("lines"), byId("lines-what")];
  put(byId("lines-h"), `Lines of ${id}`);
  what.replaceChildren(el("p", {}, "Looking..."));
  dialog.showModal();
  try {
    const told = await get(`/dashboard/batches/${encodeURIComponent(id)}`);
    const batch = state.board.batches?.[id];
    what.replaceChildren(...shown(told, batch));
  } catch (error) {
    what.replaceChildren(el("p", { role: "alert" }, error.message));
  }
}

function shown(told, batch) {
  const states = Object.entries(told.states);
  if (!states.length) {
    const rest = batch ? ` ${count(batch.completed)} were done and ${count(batch.failed)} failed.` : "";
    return [el("p", {}, `Its lines are not here: not read yet, or cleared after its end.${rest}`)];
  }
  const parts = [rows(["state", "lines"], states.map(([name, number]) => [name, count(number)]))];
  parts.push(el("p", {}, `${many(told.attempts, "attempt")} charged; put back without charge ${many(told.returns, "time")}, take-backs among them.`));
  if (told.failures.length) parts.push(el("h3", {}, "Why lines failed"), rows(["code", "lines"], told.failures.map(([code, number]) => [code, count(number)])));
  if (told.running.length) {
    parts.push(el("h3", {}, "The first that run"), rows(["line", "last on node", "attempts", "put back"],
      told.running.map((one) => [count(one.line), one.node ?? "-", one.attempts, one.returns])));
  }
  return parts;
}

function rows(heads, cells) {
  return el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((word) => el("th", { scope: "col" }, word)))),
    el("tbody", {}, ...cells.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, String(cell)))))));
}
